"""The one place that draws: charts and tables as plain data, as files and on pages.

Other rooms say what there is to see by a `LineChart`, a `BarChart` or a `Table`; `svg` writes
charts as files, and `Page` is a report as one HTML file. matplotlib and plotly are an extra, and
are imported when something is drawn.
"""
