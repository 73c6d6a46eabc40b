"""The report of a smoke run as one page of HTML: plot.py and words.py, sheet.py, page.py."""
