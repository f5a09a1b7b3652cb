//! Goal: only one place calls the program's code, and it contains panics. No production code except `TaskWaker` owns a
//! waker that it could wake, clone or drop, and events of `tracing` are emitted only by `event!`.
//!
//! A borrowed `Waker` can only be cloned and woken by reference: neither is allowed elsewhere.

use std::path::Path;

use millpond_checks::{Crate, is_production};
use quote::ToTokens;
use syn::visit::{self, Visit};

/// Violations in one file.
#[derive(Default)]
struct Violations(Vec<String>);

impl<'ast> Visit<'ast> for Violations {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(it) => &it.attrs,
            syn::Item::Fn(it) => &it.attrs,
            syn::Item::Impl(it) => &it.attrs,
            _ => return visit::visit_item(self, item),
        };
        if is_production(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_type_reference(&mut self, reference: &'ast syn::TypeReference) {
        // A borrowed waker is allowed.
        if !is_waker(&reference.elem) {
            visit::visit_type_reference(self, reference);
        }
    }

    fn visit_type(&mut self, of: &'ast syn::Type) {
        if is_waker(of) {
            self.0.push("a `Waker` that is not borrowed".into());
        }
        visit::visit_type(self, of);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let receiver = call.receiver.to_token_stream().to_string();
        let of_waker = receiver.ends_with("waker") || receiver.ends_with("waker ()");
        if call.method == "wake_by_ref" || call.method == "clone" && of_waker {
            self.0.push(format!("{receiver}.{}()", call.method));
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if call.path.segments.first().is_some_and(|first| first.ident == "tracing") {
            self.0.push(format!("{}!", call.path.to_token_stream()));
        }
    }
}

fn is_waker(of: &syn::Type) -> bool {
    let syn::Type::Path(path) = of else { return false };
    path.path.segments.last().is_some_and(|last| last.ident == "Waker")
}

fn found(text: &str) -> Vec<String> {
    let mut found = Violations::default();
    found.visit_file(&syn::parse_file(text).unwrap());
    found.0
}

#[test]
fn wakers_and_subscribers_are_called_in_one_place() {
    let mut all = Vec::new();
    for (root, exempt) in [("rangelock", "callback.rs"), ("millpond", "")] {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(root).join("src");
        for name in Crate::read(root, &source.join("lib.rs")).files.keys() {
            let text = std::fs::read_to_string(source.join(name)).unwrap();
            if name != exempt {
                all.extend(found(&text).iter().map(|what| format!("{root}: {name}: {what}")));
            }
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

/// Goal: each way to call a waker is found, and correct code is accepted.
#[test]
fn finds_each_way_to_call_a_waker() {
    for wrong in [
        "struct Task { waker: Option<Waker> }",
        "fn wake(waker: std::task::Waker) { waker.wake() }",
        "fn wake(waker: &Waker) { waker.wake_by_ref() }",
        "fn poll(cx: &mut Context<'_>) { cx.waker().clone().wake() }",
        "fn poll(waker: &Waker) { drop(waker.clone()) }",
        "fn warn() { tracing::warn!(\"lost\"); }",
    ] {
        assert_eq!(found(wrong).len(), 1, "{wrong}: {:?}", found(wrong));
    }
    let right = "fn poll(waker: &Waker) -> TaskWaker { TaskWaker::new(waker) }
        #[cfg(test)] mod tests { fn wake(waker: Waker) { waker.wake() } }";
    assert!(found(right).is_empty());
}
