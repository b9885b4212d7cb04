"""The measures: each module takes one kind of measure of one contender, in a database of its own."""
