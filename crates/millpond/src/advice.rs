//! Hints that a program can give about how it will use a file.

/// How a range of a file will be used, after `posix_fadvise`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// No particular pattern: read-ahead as detected (the default).
    Normal,
    /// Read in order: read-ahead starts at once, and with twice the window.
    Sequential,
    /// Read in no order: this handle starts no read-ahead.
    Random,
    /// Will be read soon: fill what can be filled without waiting.
    WillNeed,
    /// Won't be read soon: drop what is cached and not in use.
    DontNeed,
}
