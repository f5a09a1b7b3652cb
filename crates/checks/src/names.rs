//! Resolves Rust paths (`a::b::C`) to the source files that define them, for the checks of a crate's structure.

use std::collections::BTreeMap;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Field, ImplItem, Item, Macro, Path, Stmt, TraitItem, Visibility};

use crate::module::{Module, ModulePath, attributes, is_production};

type Modules = BTreeMap<ModulePath, Module>;

/// Longest chain of `pub use` that is followed.
const REEXPORTS_MAX: usize = 16;

pub(crate) struct UsedNames<'a> {
    modules: &'a Modules,
    here: &'a ModulePath,
    found: Vec<(String, String, String)>,
}

impl UsedNames<'_> {
    /// The names that the module at `here` uses from other files: (its file, the other file, the name).
    pub(crate) fn of(modules: &Modules, here: &ModulePath) -> Vec<(String, String, String)> {
        let module = &modules[here];
        let mut names = UsedNames { modules, here, found: Vec::new() };
        // A re-export does not count as a use of the name.
        for import in module.imports.values().filter(|import| !import.is_public) {
            names.note(&import.path);
        }
        for glob in &module.globs {
            names.note(glob);
        }
        for item in &module.items {
            names.visit_item(item);
        }
        names.found
    }

    fn note(&mut self, path: &[String]) {
        let Some(full) = absolute(self.modules, self.here, path) else { return };
        let Some((file, name)) = resolve(self.modules, &full, 0) else { return };
        let from = &self.modules[self.here].file;
        if *from != file {
            self.found.push((from.clone(), file, name));
        }
    }

    fn note_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.note_unless_empty(&mut path);
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.note_unless_empty(&mut path);
                    self.note_tokens(group.stream());
                    colons = 0;
                }
                _ => {
                    self.note_unless_empty(&mut path);
                    colons = 0;
                }
            }
        }
        self.note_unless_empty(&mut path);
    }

    fn note_unless_empty(&mut self, path: &mut Vec<String>) {
        if path.len() > 1 {
            self.note(path);
        }
        path.clear();
    }
}

/// A path in the module `here` as a path from the root of the crate; `None` for names of other crates and local names.
fn absolute(modules: &Modules, here: &ModulePath, path: &[String]) -> Option<Vec<String>> {
    let module = &modules[here];
    let mut base = here.clone();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            base.clear();
            rest = &path[1..];
        }
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|first| first == "super") {
                base.pop()?;
                rest = &rest[1..];
            }
        }
        first if module.children.contains(first) => {}
        first => {
            let import = module.imports.get(first).filter(|import| import.path[0] != first)?;
            base = absolute(modules, here, &import.path)?;
            rest = &path[1..];
        }
    }
    base.extend_from_slice(rest);
    Some(base)
}

/// The file that defines the item at `full`, and the item's name; `None` if `full` is a module.
fn resolve(modules: &Modules, full: &[String], reexports: usize) -> Option<(String, String)> {
    let depth = (0..=full.len()).rev().find(|&depth| modules.contains_key(&full[..depth]))?;
    let (here, rest) = (full[..depth].to_vec(), &full[depth..]);
    let name = rest.first()?;
    let module = &modules[&here];
    if reexports < REEXPORTS_MAX {
        if let Some(import) = module.imports.get(name) {
            let mut target = absolute(modules, &here, &import.path)?;
            target.extend_from_slice(&rest[1..]);
            return resolve(modules, &target, reexports + 1);
        }
        let is_own = module.items.iter().any(|item| defines(item, name));
        for glob in module.globs.iter().filter(|_| !is_own) {
            let Some(target) = absolute(modules, &here, glob) else { continue };
            let defined = modules.get(&target).is_some_and(|it| {
                it.imports.contains_key(name) || it.items.iter().any(|item| defines(item, name))
            });
            if defined {
                let target = [target, rest.to_vec()].concat();
                return resolve(modules, &target, reexports + 1);
            }
        }
    }
    Some((module.file.clone(), name.clone()))
}

fn defines(item: &Item, name: &str) -> bool {
    match item {
        Item::Const(it) => it.ident == name,
        Item::Enum(it) => it.ident == name,
        Item::Fn(it) => it.sig.ident == name,
        Item::Macro(it) => it.ident.as_ref().is_some_and(|ident| ident == name),
        Item::Static(it) => it.ident == name,
        Item::Struct(it) => it.ident == name,
        Item::Trait(it) => it.ident == name,
        Item::Type(it) => it.ident == name,
        Item::Union(it) => it.ident == name,
        _ => false,
    }
}

impl<'ast> Visit<'ast> for UsedNames<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_production(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attrs = match item {
            ImplItem::Const(it) => &it.attrs[..],
            ImplItem::Fn(it) => &it.attrs,
            ImplItem::Type(it) => &it.attrs,
            _ => &[],
        };
        if is_production(attrs) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        let attrs = match item {
            TraitItem::Fn(it) => &it.attrs[..],
            _ => &[],
        };
        if is_production(attrs) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if is_production(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        let attrs = match statement {
            Stmt::Local(it) => &it.attrs[..],
            Stmt::Item(it) => attributes(it),
            Stmt::Macro(it) => &it.attrs,
            Stmt::Expr(syn::Expr::Block(it), _) => &it.attrs,
            Stmt::Expr(syn::Expr::If(it), _) => &it.attrs,
            Stmt::Expr(..) => &[],
        };
        if is_production(attrs) {
            visit::visit_stmt(self, statement);
        }
    }

    fn visit_path(&mut self, path: &'ast Path) {
        let names: Vec<String> = path.segments.iter().map(|it| it.ident.to_string()).collect();
        // A single name is either imported, and recorded at the import, or defined in this module.
        if names.len() > 1 && path.leading_colon.is_none() {
            self.note(&names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        self.note_tokens(called.tokens.clone());
    }

    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}
