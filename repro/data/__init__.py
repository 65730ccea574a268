"""Problems from all sources, and the prompts that are made from them.

`problem` holds the value and its JSONL form, `load` dispatches a `DataConfig` to the generator, to
a public data set (`public`, the only module that imports `datasets`) or to a local folder
(`folder`), and `prompts` turns a question into token ids.
"""
