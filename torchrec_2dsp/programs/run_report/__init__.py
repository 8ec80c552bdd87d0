"""The page on a training run.

```text
folder of train --RunContents.read--> RunContents --run_page--> Page (library: report) --> HTML
                                        charts.py, steps.py: parts of the page
```

`programs.train` writes the files, `programs.traces` reads traces. Nothing here needs torch or
TorchRec, so that the command is quick; only access statistics and traces take longer to read.
"""
