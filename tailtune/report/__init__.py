"""The before/after report of a run, one HTML file.

- `collect.py`: reads what the steps wrote, asks both models the demo questions, writes the file.
- `page.py`: what the page says: outcome, bars for floor, base and tuned model, gate rules, metric rows.
- `charts.py`: training curves as SVG paths.
- `format.py`: numbers, sizes and durations as text.
- `template.py`: the Jinja environment, which escapes every text.
- `report.html.j2`: the page's HTML and CSS.
"""
