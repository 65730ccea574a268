"""Problems, where they come from, and the prompts made of them.

`problem` holds the value and its JSONL form, `load` dispatches a `DataConfig` to the generator, to
a public data set (`public`, the only module that imports `datasets`) or to a local folder
(`folder`), and `prompts` turns a question into token ids.
"""
