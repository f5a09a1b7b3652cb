//! The declarations of a module, and which of them are production code.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Attribute, Item, Meta, Token, punctuated::Punctuated};

/// A name that a `use` brings into a module.
pub(crate) struct Import {
    pub(crate) path: Vec<String>,
    pub(crate) is_public: bool,
}

/// A module, by its path from the root of the crate.
pub(crate) type ModulePath = Vec<String>;

/// The declarations of a module.
pub(crate) struct Module {
    pub(crate) file: String,
    pub(crate) children: BTreeSet<String>,
    /// Imported and re-exported names, with their paths.
    pub(crate) imports: BTreeMap<String, Import>,
    /// Modules of glob imports.
    pub(crate) globs: Vec<ModulePath>,
    pub(crate) items: Vec<Item>,
}

pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::ExternCrate(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::ForeignMod(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Macro(it) => &it.attrs,
        Item::Mod(it) => &it.attrs,
        Item::Static(it) => &it.attrs,
        Item::Struct(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        Item::Union(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        _ => &[],
    }
}

/// Whether an item with these attributes is part of a production build: not of a test, a model or documentation.
pub fn is_production(attrs: &[Attribute]) -> bool {
    let conditions = attrs.iter().filter(|attr| attr.path().is_ident("cfg"));
    conditions
        .filter_map(|attr| attr.parse_args::<Meta>().ok())
        .all(|meta| holds(&meta) != Some(false))
}

/// Whether a condition holds in a production build; `None`: it depends on the build.
fn holds(condition: &Meta) -> Option<bool> {
    let name = condition.path().get_ident().map(ToString::to_string).unwrap_or_default();
    let Meta::List(list) = condition else {
        return matches!(name.as_str(), "test" | "loom" | "doc" | "fuzzing").then_some(false);
    };
    let inner = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).ok()?;
    let mut inner = inner.iter().map(holds);
    match name.as_str() {
        "not" => inner.next()?.map(|holds| !holds),
        "all" => inner.any(|it| it == Some(false)).then_some(false),
        "any" => inner.all(|it| it == Some(false)).then_some(false),
        _ => None,
    }
}
