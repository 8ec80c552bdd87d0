"""Why a plan is as it is: its predicted step by table and by rank, as text or as a page."""
