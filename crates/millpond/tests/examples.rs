//! Runs the examples, which check their own results.

#[path = "../examples/file_server.rs"]
#[allow(dead_code)]
mod file_server;
#[path = "../examples/key_value.rs"]
#[allow(dead_code)]
mod key_value;
#[path = "../examples/vector_search.rs"]
#[allow(dead_code)]
mod vector_search;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_file_server() {
    file_server::serve_itself(dir().path()).unwrap();
}

#[test]
fn a_key_value_store() {
    key_value::run(dir().path()).unwrap();
}

#[test]
fn a_vector_search() {
    vector_search::run(dir().path()).unwrap();
}
