"""The command line: `medha up` and its companions."""
