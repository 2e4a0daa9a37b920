"""Runs a program as a container, as the kubelet does, without images: with its own user, volumes and root file system.

    python -I -S container.py CONTAINER PROGRAM ARGUMENT…

CONTAINER is the JSON of a `Container`. The program sees this machine's files, all of them read-only, and its volumes
where they are mounted and nowhere else; its user is in no file of users. It keeps the process id, so signals reach it.
This needs Linux with user namespaces (`why_not`); it does not need to be root.
"""

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1


@dataclass
class Container:
    root: str
    """An empty directory."""
    user: int
    mounts: dict[str, str] = field(default_factory=dict)
    """Directory or file of this machine by the path at which the program finds it, writable."""
    image: list[str] = field(default_factory=list)
    """Directories that stay visible below a mount, because the program itself is in them."""

    def command(self, program: list[str]) -> list[str]:
        """The command line that runs the program in the container."""
        return [sys.executable, "-I", "-S", __file__, json.dumps(asdict(self)), *program]


def why_not(folder: Path) -> str:
    """Why no container can run on this machine, tried in a folder; empty if they can."""
    done = subprocess.run(Container(str(folder), 1).command(["true"]), capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2]


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}", str(arguments))


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    call("mount", source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), None)


def make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, ctypes.sizeof(attributes))


class Root:
    """The container's root directory while it is built from the machine's files."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._own: set[str] = set()
        """Directories in which others can be made, without making them on this machine."""
        self._replace("/")

    def _replace(self, path: str) -> None:
        """Replace a directory by one with the same content, to which entries can be added."""
        new = self.path + path
        entries = list(os.scandir(path))
        mount("tmpfs", new, "tmpfs")
        for entry in entries:
            copy = os.path.join(new, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), copy)
                continue
            self._make(copy, entry.path)
            mount(entry.path, copy, flags=MS_BIND | MS_REC)
        self._own.add(path)

    def _make(self, new: str, like: str) -> None:
        if os.path.isdir(like):
            os.mkdir(new)
        else:
            Path(new).touch()

    def provide(self, path: str, like: str) -> None:
        """Make a directory, or a file if `like` is one, unless it exists."""
        if not os.path.exists(self.path + path):
            parent = os.path.dirname(path)
            self.provide(parent, "/")
            if parent not in self._own:
                self._replace(parent)
            self._make(self.path + path, like)
            self._own.add(path)

    def bind(self, source: str, path: str) -> None:
        mount(source, self.path + path, flags=MS_BIND | MS_REC)
        self._own.add(path)


def enter(container: Container) -> None:
    """Make this process that of the container."""
    user, group = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{container.user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")  # images' files belong to group 0
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mounts = {os.path.realpath(path): source for path, source in container.mounts.items()}
    root = Root(container.root)
    for path, source in mounts.items():
        root.provide(path, source)
    make_read_only(root.path)
    for path in sorted(mounts):
        root.bind(mounts[path], path)
    for path in {os.path.realpath(path) for path in container.image}:
        if any(path.startswith(f"{target}/") for target in mounts):
            root.provide(path, path)
            root.bind(path, path)
            make_read_only(root.path + path)
    os.chroot(root.path)
    os.chdir("/")


if __name__ == "__main__":
    enter(Container(**json.loads(sys.argv[1])))
    os.execvp(sys.argv[2], sys.argv[2:])
