//! Loom models of the page word, the pins and the table's holds.
