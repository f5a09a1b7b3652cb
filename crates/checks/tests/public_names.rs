//! Goal: the root of the crate `millpond` stays small, and no public item is hidden from the documentation.
//!
//! The root has at most 32 names, each of the list below: a new public item goes into a module. `doc(hidden)` is for the
//! module `internals` alone, which the feature of that name adds.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::visit::Visit;
use syn::{Attribute, Item, UseTree, Visibility};

const NAMES_MAX: usize = 32;

const ALLOWED: &[&str] = &[
    // Modules.
    "blob",
    "direct",
    "fault",
    "file",
    "keeper",
    "queue",
    "sim",
    "stats",
    // The engine, and how it is built.
    "Admission",
    "BackendChoice",
    "Engine",
    "EngineBuilder",
    // Files, and how they are opened.
    "Advice",
    "AsyncFile",
    "Backing",
    "File",
    "OpenOptions",
    "PAGE_BYTES_MAX",
    "PAGE_BYTES_MIN",
    "ReadAt",
    "ReadVectoredAt",
    "View",
    "WriteMode",
    // Memory.
    "BUFFER_ALIGN_BYTES",
    "Buffer",
    // Errors.
    "Error",
    "Op",
    "PersistStep",
    "Result",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../millpond/src")
}

fn has(attributes: &[Attribute], what: &str) -> bool {
    attributes.iter().any(|attribute| attribute.to_token_stream().to_string().contains(what))
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    has(attributes, "doc (hidden")
}

fn names_of(tree: &UseTree, names: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => names_of(&path.tree, names),
        UseTree::Name(name) => drop(names.insert(name.ident.to_string())),
        UseTree::Rename(rename) => drop(names.insert(rename.rename.to_string())),
        UseTree::Group(group) => group.items.iter().for_each(|item| names_of(item, names)),
        UseTree::Glob(_) => drop(names.insert("*".into())),
    }
}

/// The names at the root of a crate that its users see.
fn root_names(file: &syn::File) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for item in &file.items {
        let (visibility, attributes, name) = match item {
            Item::Use(item) => {
                let is_seen = matches!(item.vis, Visibility::Public(_));
                if is_seen && !is_hidden(&item.attrs) {
                    names_of(&item.tree, &mut names);
                }
                continue;
            }
            Item::Const(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Enum(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Fn(item) => (&item.vis, &item.attrs, &item.sig.ident),
            Item::Mod(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Static(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Struct(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Trait(item) => (&item.vis, &item.attrs, &item.ident),
            Item::Type(item) => (&item.vis, &item.attrs, &item.ident),
            _ => continue,
        };
        if matches!(visibility, Visibility::Public(_)) && !is_hidden(attributes) {
            names.insert(name.to_string());
        }
    }
    names
}

#[test]
fn the_root_has_few_names_and_no_others() {
    let file = syn::parse_file(&fs::read_to_string(root().join("lib.rs")).unwrap()).unwrap();
    let names = root_names(&file);
    let allowed: BTreeSet<String> = ALLOWED.iter().map(|name| name.to_string()).collect();
    assert_eq!(names, allowed, "a public name belongs into one of the modules");
    assert!(names.len() <= NAMES_MAX, "{} names", names.len());
}

/// Finds attributes that hide items, except for what only fuzzing builds.
#[derive(Default)]
struct Hidden {
    found: Vec<String>,
}

impl<'ast> Visit<'ast> for Hidden {
    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if is_hidden(std::slice::from_ref(attribute)) {
            self.found.push(attribute.to_token_stream().to_string());
        }
    }

    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Mod(item) if item.ident == "internals" => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => return syn::visit::visit_item(self, item),
        };
        let is_left_out = has(attributes, "cfg (fuzzing") || has(attributes, "\"internals\"");
        if !is_left_out {
            syn::visit::visit_item(self, item);
        }
    }
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_public_item_is_hidden_outside_internals() {
    let mut paths = Vec::new();
    sources(&root(), &mut paths);
    assert!(paths.len() > 100, "the sources were not found");
    for path in paths {
        let mut hidden = Hidden::default();
        hidden.visit_file(&syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap());
        assert!(hidden.found.is_empty(), "{}: {:?}", path.display(), hidden.found);
    }
}

/// Goal: names are found in each kind of item and of import, and hidden items anywhere.
#[test]
fn finds_names_and_hidden_items() {
    let text =
        "pub mod a; mod b; pub use c::{d::E, f as G}; #[doc(hidden)] pub use h::I; pub struct J;
        #[cfg(feature = \"internals\")] #[doc(hidden)] pub mod internals;
        impl J { #[doc(hidden)] pub fn k(&self) {} }";
    let file = syn::parse_file(text).unwrap();
    let names: Vec<String> = root_names(&file).into_iter().collect();
    assert_eq!(names, ["E", "G", "J", "a"]);
    let mut hidden = Hidden::default();
    hidden.visit_file(&file);
    assert_eq!(hidden.found.len(), 2, "{:?}", hidden.found);
}
