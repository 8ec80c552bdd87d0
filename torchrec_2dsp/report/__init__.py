"""How pages and plots look and how they are written. Its libraries are an extra."""
