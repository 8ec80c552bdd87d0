"""The HTML page on a training run.

```text
train's folder --RunContents.read--> RunContents --run_page--> Page (library: report) --> HTML
                                       charts.py, steps.py: sections of the page
```

`programs.train` writes the files, `programs.traces` reads traces. Nothing here needs torch or
TorchRec, so the command starts quickly; only access statistics and traces take longer to read.
"""
