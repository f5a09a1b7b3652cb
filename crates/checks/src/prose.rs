//! Counts clauses of comments, documents and messages that name no actor in the field's terms.
//!
//! A clause is text between `.`, `:` and `;` of four words or more. A clause is *hard to read* if it has one
//! of the constructions of [`CONSTRUCTIONS`]: they replace a noun of the field by a pronoun or a relative
//! clause, so that a reader has to search for the subject. Code spans, code blocks and the ruling lines of
//! tables are skipped.
//!
//! The check covers comments and string literals in Rust, comments in C and in scripts, and all text in
//! Markdown.

use std::path::Path;
use std::str::FromStr;
use std::sync::LazyLock;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use regex::Regex;

/// Each construction, with the words to use instead.
pub const CONSTRUCTIONS: &[(&str, &str)] = &[
    (r"\b[Nn]obody\b", "name the actor: no thread, no caller, no process"),
    (r"\b[Ss]omebody\b", "name the actor: a thread, another process"),
    (r"\b[Ww](hoever|hatever|herever)\b", "name the actor or the thing"),
    (r"\b(told|tells?)\b", "report, return, notify, log"),
    (r"\b[Aa]new\b", "again"),
    (r"\b[Mm]eanwhile\b", "concurrently, during the call"),
    (r"\b(for|as) ever\b", "indefinitely; as usual"),
    (r"\bonce more\b", "again"),
    (r"\b(in|at) hand\b", "in write-back, in flight, being read"),
    (
        r"\b[Ww]ho (has|is|was|lets?|takes?|gives?|waits?|reads?|writes?|comes?|goes|closes|leads|finds|asks)\b",
        "the caller, the writer, the thread that",
    ),
    (
        r"\b[Ww]hat (is|was|are|has|it|they|a|the|others|comes|waits|goes|can|lies|came)\b",
        "a noun: dirty pages, the cached bytes, the error",
    ),
    (r"\b[Ww]hom\b", "name the actor"),
    (r"\b[Hh]e (may|must|is|has|does|can|was)\b", "threads and processes are \"it\""),
    (r"\b(lets?|letting) go\b", "release, close, evict"),
    (r"\bow(e|es|ed)\b", "is dirty, has unsynced bytes"),
    (r"\bsees to it\b", "ensures"),
    (r"\bbefore long\b", "soon, with a bound"),
    (r"\b[Ss]o many (are|have|may|were|can)\b", "N of them"),
];

/// All constructions in one pattern, as most clauses match none.
static ANY: LazyLock<Regex> = LazyLock::new(|| {
    let patterns: Vec<&str> = CONSTRUCTIONS.iter().map(|(pattern, _)| *pattern).collect();
    Regex::new(&format!("(?-u:{})", patterns.join("|"))).expect("valid patterns")
});

/// A clause that is hard to read.
#[derive(Debug, PartialEq, Eq)]
pub struct HardClause {
    /// The clause, on one line.
    pub clause: String,
    /// Words that replace its first construction.
    pub advice: &'static str,
}

/// The hard clauses of the file at `path`; none for file types without prose.
#[must_use]
pub fn hard_clauses(path: &Path, text: &str) -> Vec<HardClause> {
    let Some(prose) = prose_of(path, text) else { return Vec::new() };
    let hard = |clause: String| {
        let found = ANY.find(&clause)?.as_str();
        let is_it = |pattern: &str| Regex::new(pattern).is_ok_and(|it| it.is_match(found));
        let (_, advice) = CONSTRUCTIONS.iter().find(|(pattern, _)| is_it(pattern))?;
        Some(HardClause { clause, advice })
    };
    clauses(&prose).into_iter().filter_map(hard).collect()
}

/// The prose of a file; `None` for file types without prose.
fn prose_of(path: &Path, text: &str) -> Option<String> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("md") => Some(text.into()),
        Some("rs") => Some(format!("{}\n\n{}", comments_of_rust(text), messages_of_rust(text))),
        Some("c" | "h" | "cc" | "cpp") => Some(comments_of_c(text)),
        Some("py" | "sh") => Some(comments_of_script(text)),
        None if text.starts_with("#!") => Some(comments_of_script(text)),
        _ => None,
    }
}

/// The comment lines. Other lines become empty, so they end a paragraph.
fn comments_of_rust(text: &str) -> String {
    let comment = |line: &str| {
        let rest = line.trim_start().strip_prefix("//")?;
        Some(rest.trim_start_matches(['/', '!']).to_owned())
    };
    lines(text, comment)
}

fn comments_of_script(text: &str) -> String {
    let comment = |line: &str| {
        let rest = line.trim_start().strip_prefix('#')?;
        (!rest.starts_with('!')).then(|| rest.to_owned())
    };
    lines(text, comment)
}

fn lines(text: &str, comment: impl Fn(&str) -> Option<String>) -> String {
    text.lines().map(|line| comment(line).unwrap_or_default() + "\n").collect()
}

fn comments_of_c(text: &str) -> String {
    let (mut prose, mut rest) = (String::new(), text);
    while let Some(start) = rest.find("/*") {
        let Some(len) = rest[start + 2..].find("*/") else { break };
        let block = &rest[start + 2..start + 2 + len];
        for line in block.lines() {
            prose += line.trim_start().trim_start_matches('*');
            prose.push('\n');
        }
        prose.push('\n');
        rest = &rest[start + 2 + len + 2..];
    }
    for line in text.lines() {
        if let Some((_, comment)) = line.split_once("//") {
            prose += comment;
            prose += "\n\n";
        }
    }
    prose
}

/// The string literals of Rust code, each a paragraph. Attributes are left out: `///` is one.
fn messages_of_rust(text: &str) -> String {
    let mut messages = String::new();
    if let Ok(tokens) = TokenStream::from_str(text) {
        add_messages(tokens, &mut messages);
    }
    messages
}

fn add_messages(tokens: TokenStream, messages: &mut String) {
    let mut is_after_hash = false;
    for token in tokens {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' || punct.as_char() == '!' => {
                is_after_hash |= punct.as_char() == '#';
                continue;
            }
            TokenTree::Group(group) if is_after_hash && group.delimiter() == Delimiter::Bracket => {
            }
            TokenTree::Group(group) => add_messages(group.stream(), messages),
            TokenTree::Literal(literal) => {
                let literal = literal.to_string();
                if literal.starts_with(['"', 'r'])
                    && let Ok(syn::Lit::Str(literal)) = syn::parse_str(&literal)
                {
                    *messages += &literal.value();
                    *messages += "\n\n";
                }
            }
            _ => {}
        }
        is_after_hash = false;
    }
}

static SPLITS: LazyLock<[Regex; 5]> = LazyLock::new(|| {
    [
        // Code spans, link targets, ruling lines of tables.
        r"`[^`\n]*`",
        r"\]\([^)]*\)",
        r"(?m)^\s*\|[-| :]+\|\s*$",
        // Ends of paragraphs, list items and cells; ends of clauses.
        r"\n\s*\n|\n\s*[-*|] |\|",
        r"[.:;](?:\s|$)",
    ]
    .map(|pattern| Regex::new(pattern).expect("a valid pattern"))
});

fn clauses(prose: &str) -> Vec<String> {
    let [code_span, link, table_rule, paragraph_end, clause_end] = &*SPLITS;
    let (mut text, mut is_code) = (String::new(), false);
    for line in prose.lines() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if !is_code && !is_fence {
            text += line;
        }
        text.push('\n');
    }
    let text = table_rule.replace_all(&text, "");
    let text = code_span.replace_all(&text, "X");
    let text = link.replace_all(&text, "]");
    let mut found = Vec::new();
    for paragraph in paragraph_end.split(&text) {
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        let line = words.join(" ");
        for clause in clause_end.split(&line) {
            if clause.split_whitespace().count() >= 4 {
                found.push(clause.trim().to_owned());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hard_in(name: &str, text: &str) -> Vec<String> {
        hard_clauses(Path::new(name), text).into_iter().map(|hard| hard.clause).collect()
    }

    #[test]
    fn hard_clauses_of_each_kind_of_file_are_found() {
        let rust = "// A page that nobody reads stays. It is evicted later.\nfn f() {}\n";
        assert_eq!(hard_in("a.rs", rust), ["A page that nobody reads stays"]);
        let message = "fn f() { panic!(\"the file is written anew here\") }";
        assert_eq!(hard_in("a.rs", message), ["the file is written anew here"]);
        assert_eq!(
            hard_in("a.c", "/* The caller\n * is told of it. */"),
            ["The caller is told of it"]
        );
        assert_eq!(hard_in("a.sh", "# Whoever waits is woken up\ntrue\n").len(), 1);
        assert_eq!(hard_in("a.md", "- Pages in hand are kept\n- as are others\n").len(), 1);
    }

    #[test]
    fn code_and_short_clauses_do_not_count() {
        assert!(hard_in("a.md", "```\nnobody reads all of this\n```\n").is_empty());
        assert!(hard_in("a.md", "The variable `nobody` is a code span.").is_empty());
        assert!(hard_in("a.md", "Told so: fine.").is_empty());
        assert!(hard_in("a.txt", "nobody reads all of this").is_empty());
        let attribute = "#[doc = \"nobody reads all of this\"]\nfn f() {}";
        assert!(hard_in("a.rs", attribute).is_empty());
    }
}
