"""The pipeline servers that OpenShift AI ships (3.0 to 3.3, 3.4, 3.5) read the compiled files, by their kfp's protos.

Each version is installed from the package index into its own environment.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pipeline

COMPILED = Path(pipeline.__file__).parent / "compiled"
PARSE = textwrap.dedent("""
    import sys
    from importlib import metadata
    import yaml
    from google.protobuf import json_format
    from kfp.kubernetes import kubernetes_executor_config_pb2
    from kfp.pipeline_spec import pipeline_spec_pb2

    specification, platform = yaml.safe_load_all(open(sys.argv[1], encoding="utf-8"))
    parsed = json_format.ParseDict(specification, pipeline_spec_pb2.PipelineSpec())
    json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for executor in executors.values():
        json_format.ParseDict(executor, kubernetes_executor_config_pb2.KubernetesExecutorConfig())
    print(metadata.version("kfp"), len(parsed.components), len(executors))
""")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.14.3", "2.16.0", "2.16.1"])
def test_an_older_server_reads_every_field(tmp_path: Path, version: str) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"kfp=={version}",
               f"kfp-kubernetes=={version}"]  # fmt: skip
    subprocess.run(install, check=True, timeout=600)
    for path in sorted(COMPILED.glob("*.yaml")):
        result = subprocess.run([str(python), "-c", PARSE, str(path)], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr[-2000:]
        installed, num_components, num_executors = result.stdout.split()
        assert installed == version and int(num_components) > 10 and int(num_executors) > 5


@pytest.mark.slow
def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    """The parser is strict: otherwise the test above could not fail."""
    text = (COMPILED / "survival.yaml").read_text(encoding="utf-8")
    path = tmp_path / "survival.yaml"
    path.write_text(text.replace("secretAsVolume:", "secretAsNothing:"), encoding="utf-8")
    result = subprocess.run([sys.executable, "-c", PARSE, str(path)], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and "secretAsNothing" in result.stderr
