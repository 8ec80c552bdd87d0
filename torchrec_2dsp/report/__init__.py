"""Draws everything in one place: charts and tables as plain data, as files and on pages.

Other rooms describe a `LineChart`, a `BarChart` or a `Table`; `charts` writes line charts as SVG,
`table` renders tables as text, Markdown and HTML, and `Page` is a report in one HTML file.
matplotlib, plotly and rich are extras, imported only for drawing.
"""
