//! Loads the module tree of a crate and the source file of each module, for the checks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::{Attribute, Item, Meta, UseTree, Visibility};

use crate::module::{Import, Module, ModulePath, attributes, is_production};
use crate::names::UsedNames;

/// One file of a crate.
pub struct SourceFile {
    /// The path below `src`, with slashes.
    pub name: String,
    /// The text, including tests and comments.
    pub lines: usize,
    /// The files whose names this file uses, with the names.
    pub imports: BTreeMap<String, BTreeSet<String>>,
}

/// The production code of a crate.
pub struct Crate {
    /// The crate's name, for messages.
    pub name: String,
    /// The files, by name.
    pub files: BTreeMap<String, SourceFile>,
    /// The files that define a type of each name: structs, enums, unions, traits and aliases.
    pub types: BTreeMap<String, Vec<String>>,
}

impl Crate {
    /// Reads the crate whose root is `root`, `src/lib.rs` or `src/main.rs`.
    ///
    /// # Panics
    ///
    /// If a file cannot be read or is not Rust.
    pub fn read(name: &str, root: &Path) -> Crate {
        let source = root.parent().expect("a file in a folder");
        let mut reader = Reader { source, modules: BTreeMap::new(), lines: BTreeMap::new() };
        reader.read_file(root, source, Vec::new());
        let Reader { modules, lines, .. } = reader;
        let mut files: BTreeMap<String, SourceFile> = lines
            .into_iter()
            .map(|(name, lines)| {
                (name.clone(), SourceFile { name, lines, imports: BTreeMap::new() })
            })
            .collect();
        for path in modules.keys() {
            for (from, to, what) in UsedNames::of(&modules, path) {
                let file = files.get_mut(&from).expect("read above");
                file.imports.entry(to).or_default().insert(what);
            }
        }
        let mut types: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for module in modules.values() {
            for name in module.items.iter().filter_map(name_of_type) {
                types.entry(name).or_default().push(module.file.clone());
            }
        }
        Crate { name: name.to_string(), files, types }
    }
}

struct Reader<'a> {
    source: &'a Path,
    modules: BTreeMap<ModulePath, Module>,
    lines: BTreeMap<String, usize>,
}

impl Reader<'_> {
    fn read_file(&mut self, file: &Path, children_in: &Path, path: ModulePath) {
        let text = std::fs::read_to_string(file)
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let parsed =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let name = file.strip_prefix(self.source).expect("below src").to_string_lossy().to_string();
        self.lines.insert(name.clone(), text.lines().count());
        self.read_module(&name, children_in, path, parsed.items);
    }

    fn read_module(
        &mut self,
        file: &str,
        children_in: &Path,
        path: ModulePath,
        all_items: Vec<Item>,
    ) {
        let mut module = Module {
            file: file.to_string(),
            children: BTreeSet::new(),
            imports: BTreeMap::new(),
            globs: Vec::new(),
            items: Vec::new(),
        };
        for item in all_items {
            if !is_production(attributes(&item)) {
                continue;
            }
            match item {
                Item::Mod(child) => {
                    let name = child.ident.to_string();
                    module.children.insert(name.clone());
                    let mut child_path = path.clone();
                    child_path.push(name.clone());
                    if let Some((_, items)) = child.content {
                        self.read_module(file, &children_in.join(&name), child_path, items);
                    } else {
                        let (file, below) = file_of(children_in, &name, &child.attrs);
                        self.read_file(&file, &below, child_path);
                    }
                }
                Item::Use(item) => {
                    let is_public = !matches!(item.vis, Visibility::Inherited);
                    flatten(&item.tree, &mut Vec::new(), is_public, &mut module);
                }
                item => module.items.push(item),
            }
        }
        self.modules.insert(path, module);
    }
}

fn name_of_type(item: &Item) -> Option<String> {
    match item {
        Item::Enum(it) => Some(it.ident.to_string()),
        Item::Struct(it) => Some(it.ident.to_string()),
        Item::Trait(it) => Some(it.ident.to_string()),
        Item::Type(it) => Some(it.ident.to_string()),
        Item::Union(it) => Some(it.ident.to_string()),
        _ => None,
    }
}

/// The file of a module that is declared without a body, and the folder of its children.
fn file_of(folder: &Path, name: &str, attrs: &[Attribute]) -> (PathBuf, PathBuf) {
    for attr in attrs {
        if let Meta::NameValue(pair) = &attr.meta
            && pair.path.is_ident("path")
            && let syn::Expr::Lit(literal) = &pair.value
            && let syn::Lit::Str(path) = &literal.lit
        {
            let file = folder.join(path.value());
            let below = file.parent().expect("a file in a folder").to_path_buf();
            return (file, below);
        }
    }
    let below = folder.join(name);
    let file = folder.join(format!("{name}.rs"));
    if file.exists() { (file, below) } else { (below.join("mod.rs"), below) }
}

fn flatten(tree: &UseTree, prefix: &mut Vec<String>, is_public: bool, module: &mut Module) {
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            flatten(&path.tree, prefix, is_public, module);
            prefix.pop();
        }
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            let (path, alias) = if name == "self" {
                (prefix.clone(), prefix.last().cloned().unwrap_or_default())
            } else {
                ([prefix.clone(), vec![name.clone()]].concat(), name)
            };
            module.imports.insert(alias, Import { path, is_public });
        }
        UseTree::Rename(rename) => {
            let mut path = prefix.clone();
            if rename.ident != "self" {
                path.push(rename.ident.to_string());
            }
            // `use Trait as _` has no name, so its path distinguishes it.
            let alias = if rename.rename == "_" {
                format!("_ {}", path.join("::"))
            } else {
                rename.rename.to_string()
            };
            module.imports.insert(alias, Import { path, is_public });
        }
        UseTree::Glob(_) => module.globs.push(prefix.clone()),
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, prefix, is_public, module);
            }
        }
    }
}
