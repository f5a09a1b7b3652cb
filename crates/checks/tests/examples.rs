//! Goal: the documentation shows every public item in use. A compiled example on the page of its type calls each public
//! function of a published crate. Each public type has an example, is named in an example of its crate, or is an argument
//! or result of a function that an example calls.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use quote::ToTokens;
use syn::{Attribute, ImplItem, Item, TraitItem, UseTree, Visibility};

const CRATES: [&str; 5] =
    ["rangelock", "millpond", "millpond-objects", "millpond-store-check", "millpond-endpoint"];

/// The code in a documentation comment.
fn examples(attributes: &[Attribute]) -> String {
    let mut inside = false;
    let mut code = String::new();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("doc")) {
        let syn::Meta::NameValue(pair) = &attribute.meta else { continue };
        let text = pair.value.to_token_stream().to_string();
        for line in text.trim_matches('"').lines() {
            if line.trim_start().starts_with("```") {
                inside = !inside && !line.contains("text") && !line.contains("ignore");
            } else if inside {
                code += line;
                code.push('\n');
            }
        }
    }
    code
}

fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.to_token_stream().to_string();
        text.contains("doc (hidden") || text.contains("cfg (test") || text.contains("cfg (fuzzing")
    })
}

fn is_public(visibility: &Visibility, attributes: &[Attribute]) -> bool {
    matches!(visibility, Visibility::Public(_)) && !is_hidden(attributes)
}

#[derive(Default)]
struct Type {
    is_defined: bool,
    examples: String,
    functions: BTreeMap<String, Function>,
    /// Signatures of a trait's functions.
    signatures: String,
}

struct Function {
    examples: String,
    signature: String,
}

impl Function {
    fn of(attributes: &[Attribute], signature: &syn::Signature) -> Function {
        let signature = signature.to_token_stream().to_string();
        Function { examples: examples(attributes), signature }
    }
}

/// The methods of a macro call with lines `pub fn name(..) -> ..`. They have no example of their own.
fn generated_methods(call: &syn::Macro) -> Vec<(String, Function)> {
    let tokens = call.tokens.to_string();
    let method = |line: &str| {
        let name = line.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
        (name.to_owned(), Function { examples: String::new(), signature: line.to_owned() })
    };
    tokens.split("pub fn ").skip(1).map(method).collect()
}

fn names(text: &str, word: &str) -> bool {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|one| one == word)
}

/// The public items of a crate.
#[derive(Default)]
struct PublicApi {
    /// Names exported by `pub use` or in a public module.
    exported: BTreeSet<String>,
    types: BTreeMap<String, Type>,
    /// Examples of the crate's root.
    examples: String,
}

impl PublicApi {
    fn names(&mut self, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => self.names(&path.tree),
            UseTree::Name(name) => drop(self.exported.insert(name.ident.to_string())),
            UseTree::Rename(rename) => drop(self.exported.insert(rename.ident.to_string())),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.names(tree)),
            UseTree::Glob(_) => {}
        }
    }

    fn define(&mut self, name: String, attributes: &[Attribute], exported: bool) -> &mut Type {
        if exported {
            self.exported.insert(name.clone());
        }
        let defined = self.types.entry(name).or_default();
        defined.is_defined = true;
        defined.examples += &examples(attributes);
        defined
    }

    fn items(&mut self, items: &[Item], in_public_module: bool) {
        for item in items {
            match item {
                Item::Use(used) if is_public(&used.vis, &used.attrs) => self.names(&used.tree),
                Item::Struct(item) if is_public(&item.vis, &item.attrs) => {
                    self.define(item.ident.to_string(), &item.attrs, in_public_module);
                }
                Item::Enum(item) if is_public(&item.vis, &item.attrs) => {
                    self.define(item.ident.to_string(), &item.attrs, in_public_module);
                }
                Item::Trait(item) if is_public(&item.vis, &item.attrs) => {
                    let shown = self.define(item.ident.to_string(), &item.attrs, in_public_module);
                    // The functions of a trait need no example, but functions that use the trait do.
                    for function in &item.items {
                        let TraitItem::Fn(function) = function else { continue };
                        shown.examples += &examples(&function.attrs);
                        shown.signatures += &function.sig.to_token_stream().to_string();
                    }
                }
                Item::Fn(item) if is_public(&item.vis, &item.attrs) => {
                    let name = item.sig.ident.to_string();
                    self.define(name, &item.attrs, in_public_module);
                }
                Item::Impl(block) if block.trait_.is_none() && !is_hidden(&block.attrs) => {
                    let syn::Type::Path(path) = &*block.self_ty else { continue };
                    let name = path.path.segments.last().unwrap().ident.to_string();
                    let shown = self.types.entry(name).or_default();
                    for function in &block.items {
                        if let ImplItem::Macro(generated) = function {
                            shown.functions.extend(generated_methods(&generated.mac));
                        }
                        let ImplItem::Fn(function) = function else { continue };
                        if is_public(&function.vis, &function.attrs) {
                            let name = function.sig.ident.to_string();
                            shown
                                .functions
                                .insert(name, Function::of(&function.attrs, &function.sig));
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn without_example(&self) -> Vec<String> {
        let mut missing = Vec::new();
        let mut in_use = self.examples.clone();
        let mut types = Vec::new();
        for name in &self.exported {
            let Some(shown) = self.types.get(name).filter(|shown| shown.is_defined) else {
                continue;
            };
            let page = shown
                .functions
                .values()
                .fold(shown.examples.clone(), |all, function| all + &function.examples);
            for (function, told) in &shown.functions {
                let called = [format!(".{function}("), format!("::{function}(")];
                if called.iter().any(|call| page.contains(call)) {
                    in_use += &told.signature;
                } else {
                    missing.push(format!("{name}::{function}"));
                }
            }
            in_use += &page;
            if page.is_empty() {
                types.push(name);
            } else {
                in_use += &shown.signatures;
            }
        }
        missing.extend(types.into_iter().filter(|name| !names(&in_use, name)).cloned());
        missing
    }
}

fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if name != "tests" {
                sources(&path, all);
            }
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") && name != "internals.rs" {
            // Millpond's own crates alone use `internals`.
            all.push(path);
        }
    }
}

fn face(folder: &Path) -> PublicApi {
    let root = syn::parse_file(&fs::read_to_string(folder.join("lib.rs")).unwrap()).unwrap();
    let public_modules: BTreeSet<String> = root
        .items
        .iter()
        .filter_map(|item| match item {
            Item::Mod(module) if is_public(&module.vis, &module.attrs) => {
                Some(module.ident.to_string())
            }
            _ => None,
        })
        .collect();
    let mut face = PublicApi { examples: examples(&root.attrs), ..PublicApi::default() };
    let mut all = Vec::new();
    sources(folder, &mut all);
    for path in all {
        let file = syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap();
        let place = path.strip_prefix(folder).unwrap().with_extension("");
        let is_root = place == Path::new("lib");
        let is_public_module =
            place.components().count() == 1 && public_modules.contains(place.to_str().unwrap());
        let mut own = PublicApi { types: std::mem::take(&mut face.types), ..PublicApi::default() };
        own.items(&file.items, is_root || is_public_module);
        face.types = own.types;
        if is_root || is_public_module {
            face.exported.extend(own.exported);
        }
    }
    face
}

#[test]
fn every_public_item_has_an_example() {
    let mut missing = Vec::new();
    for name in CRATES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
        missing.extend(
            face(&folder).without_example().into_iter().map(|item| format!("{name}: {item}")),
        );
    }
    assert!(missing.is_empty(), "{} without an example:\n{}", missing.len(), missing.join("\n"));
}

#[test]
fn missing_examples_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let source = "mod shown; pub use shown::{Bare, Given, Shown};\n\
        /// ```\n/// f();\n/// ```\npub fn f() {}";
    let shown = "/// ```\n/// Shown::made().used();\n/// ```\npub struct Shown;\n\
        impl Shown { pub fn made() {} pub fn used(&self) -> Given {} pub fn unused(&self) {} fn own() {} }\n\
        /// ```text\n/// no code\n/// ```\npub struct Bare; pub struct Given; pub struct Inside;";
    fs::write(dir.path().join("lib.rs"), source).unwrap();
    fs::write(dir.path().join("shown.rs"), shown).unwrap();
    assert_eq!(face(dir.path()).without_example(), ["Shown::unused", "Bare"]);
}
