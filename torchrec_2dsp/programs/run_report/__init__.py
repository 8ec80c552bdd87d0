"""The page on a training run: `RunContents` reads the folder that `train` leaves, and `run_page`
makes a `Page` of it.

Here is what a run's page shows, and how files of a run are read for it. How charts and tables look
is in the library's room `report`; the files themselves are written by `programs.train`. Nothing
here needs torch or TorchRec, so that the command is quick; only access statistics and traces, where
there are any, take longer to read.
"""
