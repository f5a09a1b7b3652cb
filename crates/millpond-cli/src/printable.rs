//! Text of other programs on a terminal.

/// Replaces control characters, which the terminal would obey. A line feed, too: it would begin a line that looks like
/// one of ours.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The same for a text of several lines.
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}
