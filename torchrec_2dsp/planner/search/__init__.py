"""The search of exchanges, hot rows and meshes, on arrays, with the cost model."""
