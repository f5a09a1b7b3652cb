//! Makes text of other programs safe for a terminal.

/// Replaces control characters, which the terminal would interpret. A line feed, too: the text after it
/// would look like a line of this program.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The same for text of several lines.
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}
