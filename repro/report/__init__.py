"""The pages: what records and expectations say, in one vocabulary, one module per page.

A page reads checks (`repro.judge.check.Checked`) and writes Markdown; nothing here runs or judges.
`verdicts` has the words, `numbers` turns values into text, `tables` writes every table, with any
number of devices side by side; `blocks` puts what a page writes between the markers of a file.
"""
