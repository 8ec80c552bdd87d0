"""Update rules: their maths, apart from where they run."""
