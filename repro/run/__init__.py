"""From a command line to records: what it selects, what is planned, who carries it out."""
