"""The search of exchanges, hot rows and meshes, on arrays, with the cost model.

In its order: `cost_search` begins it, `candidates` and `allowed` say what may become of tables and
`choices` what each choice costs, `copies` gives some tables one copy in the world, `meshes` looks
at each mesh: in its `space` tables are selected (`select`), get ranks (`place`), change one by one
(`descent`) and get hot rows (`hot_rows`). `result` is what comes of it.
"""
