"""Problems from all sources, and the prompts that are made from them.

`problem` holds the value and how a row becomes one; `load` dispatches a `DataConfig` to the
generator, to a public data set (`public`) or to problems of a user (`own`, from the files, folders
and sets that `row_sources` reads); and `prompts` turns a question into token ids.
"""
