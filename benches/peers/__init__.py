"""The same work on kvtrie and on other indexes, in one process."""
