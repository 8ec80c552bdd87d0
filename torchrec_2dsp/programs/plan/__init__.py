"""The programs behind `plan` and `simulate`: plans for machines that needn't exist."""
