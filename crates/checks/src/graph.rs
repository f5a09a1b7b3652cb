//! Finds import circles and upward imports in the graph of a crate's files.

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

/// The layer of a file. `layers` lists folders and files, the topmost layer first; the longest matching name counts.
fn layer_of<'l>(layers: &[&[&'l str]], file: &str) -> Option<(usize, &'l str)> {
    let fits = |place: &str| {
        file == place || file.strip_prefix(place).is_some_and(|rest| rest.starts_with('/'))
    };
    let places = layers.iter().enumerate().flat_map(|(number, layer)| {
        layer.iter().filter(|place| fits(place)).map(move |&place| (number, place))
    });
    places.max_by_key(|(_, place)| place.len())
}

/// The imports that do not lead downwards, but to a layer above or to another part of the same layer. Files without a layer
/// are reported, too.
pub fn upward_imports(of: &Crate, layers: &[&[&str]]) -> Vec<String> {
    let mut found = Vec::new();
    for (from, file) in &of.files {
        let Some((above, own)) = layer_of(layers, from) else {
            found.push(format!("{from} is in no layer"));
            continue;
        };
        for (to, names) in &file.imports {
            let Some((below, place)) = layer_of(layers, to) else { continue };
            if place != own && below <= above {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                found.push(format!("{from} -> {to}: {}", names.join(", ")));
            }
        }
    }
    found
}
