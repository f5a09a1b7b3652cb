//! Circles in a graph of files.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::Crate;

/// The sets of files that import each other, directly or through others (Tarjan, 1972).
pub fn circles(of: &Crate) -> Vec<BTreeSet<String>> {
    let mut search = Search { of, states: BTreeMap::new(), stack: Vec::new(), found: Vec::new() };
    for file in of.files.keys() {
        if !search.states.contains_key(file.as_str()) {
            search.visit(file);
        }
    }
    search.found
}

struct State {
    number: usize,
    lowest: usize,
    is_on_stack: bool,
}

struct Search<'a> {
    of: &'a Crate,
    states: BTreeMap<&'a str, State>,
    stack: Vec<&'a str>,
    found: Vec<BTreeSet<String>>,
}

impl<'a> Search<'a> {
    fn visit(&mut self, file: &'a str) -> usize {
        let number = self.states.len();
        self.states.insert(file, State { number, lowest: number, is_on_stack: true });
        self.stack.push(file);
        let mut lowest = number;
        for to in self.of.files[file].imports.keys() {
            let reached = match self.states.get(to.as_str()) {
                None => self.visit(to),
                Some(state) if state.is_on_stack => state.number,
                Some(_) => continue,
            };
            lowest = lowest.min(reached);
        }
        self.states.get_mut(file).expect("inserted above").lowest = lowest;
        if self.states[file].lowest == number {
            let at = self.stack.iter().position(|&it| it == file).expect("pushed above");
            let members = self.stack.split_off(at);
            for member in &members {
                self.states.get_mut(member).expect("visited").is_on_stack = false;
            }
            if members.len() > 1 {
                self.found.push(members.into_iter().map(str::to_string).collect());
            }
        }
        lowest
    }
}

/// Whether a file of the layer `from` may import one of `to`: `layers` names folders and files of the
/// root, the topmost first, those of one line side by side.
pub fn is_allowed(layers: &[&[&str]], from: &str, to: &str) -> Result<bool, String> {
    let layer = |file: &str| {
        let place = file.split_once('/').map_or(file, |(folder, _)| folder);
        let found = layers.iter().position(|layer| layer.contains(&place));
        found.map(|layer| (place.to_string(), layer)).ok_or(format!("{file} has no layer"))
    };
    let ((from, above), (to, below)) = (layer(from)?, layer(to)?);
    Ok(from == to || above < below)
}
