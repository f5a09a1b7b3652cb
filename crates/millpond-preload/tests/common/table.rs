//! The table of calls, as data for the tests.

#[macro_use]
#[path = "../../src/calls.rs"]
mod calls;

/// The exports of a row, and the row's class.
pub struct Row {
    pub class: &'static str,
    /// The functions that the row exports.
    pub names: Vec<&'static str>,
    /// The system calls that the row handles, by their numbers.
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

/// The names of a list of calls that are not in the table. The list has lines of names, after comments.
pub fn listed(list: &str) -> impl Iterator<Item = &str> {
    list.lines().filter(|line| !line.starts_with('#')).flat_map(str::split_whitespace)
}
