"""`Mesh2D`: rank arithmetic, without process groups."""
