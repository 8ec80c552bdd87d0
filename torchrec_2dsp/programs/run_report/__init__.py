"""The HTML page on a training run.

```text
train's folder --RunContents.read--> RunContents --run_page--> Page (library: report) --> HTML
                                       gain.py, steps.py, charts.py: sections of the page
```

`programs.train` writes the files, traced steps included, and `programs.bench` the gain. Nothing
here needs torch or TorchRec, so the command starts quickly; only access statistics take longer.
"""
