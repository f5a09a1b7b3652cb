//! The table of calls, as tests look at it.

#[macro_use]
#[path = "../../src/calls.rs"]
mod calls;

/// What a row makes, and what becomes of it.
pub struct Row {
    pub class: &'static str,
    /// The functions that are exported for it.
    pub names: Vec<&'static str>,
    /// The system calls that it answers, by their numbers.
    pub numbers: Vec<&'static str>,
}

pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    macro_rules! push {
        ($class:ident [$($name:ident)*] [$($number:ident)*]) => {
            rows.push(Row {
                class: stringify!($class),
                names: vec![$(stringify!($name)),*],
                numbers: vec![$(stringify!($number).trim_start_matches("SYS_")),*],
            })
        };
    }
    macro_rules! row {
        ($class:ident fn $($name:ident)/+ ($($arguments:tt)*) -> $ret:ty
            $(=> $call:expr)? $(; after $before:expr)? $(, else $missing:expr)?
            $(, number $($all:ident)+)? $(, x86 $($x86:ident)+)?) => {
            push!($class [$($name)+] [$($($all)+)? $($($x86)+)?])
        };
        ($class:ident number $($number:ident)+ ($($arguments:tt)*) $($what:tt)*) => {
            push!($class [] [$($number)+])
        };
        ($class:ident x86 $($number:ident)+ ($($arguments:tt)*) $($what:tt)*) => {
            push!($class [] [$($number)+])
        };
        ($class:ident variadic $name:ident => $before:path) => {
            // A jump that is written for one architecture.
            if cfg!(target_arch = "x86_64") {
                push!($class [$name] [])
            }
        };
        ($class:ident routed $($name:ident)/+ => $route:path) => {
            push!($class [$($name)+] [])
        };
    }
    calls!(row);
    rows
}

/// The names of a list of those that are not in the table: lines of them, after comments.
pub fn listed(list: &str) -> impl Iterator<Item = &str> {
    list.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace)
}
