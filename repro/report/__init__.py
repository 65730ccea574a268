"""The pages: what records and expectations say, in one vocabulary, one module per page.

A page reads checks (`repro.judge.check.Checked`) and writes Markdown or HTML; nothing here runs.
`tidy` is the one table of claims, bars and values; `templates/` has the prose of what is made over
it, `one_page` the page of HTML. `verdict_words` has the words, `numbers` turns values into text,
`tables` writes tables of Markdown, `page_blocks` what stands between the markers of a file.
"""
