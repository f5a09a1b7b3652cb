import millpond
def test_open(tmp_path):
    with millpond.open(tmp_path / "x", "w+b") as f:
        assert f.write(b"pond\nmill\n") == 10
        assert f.pread(4, 0) == b"pond"
        f.seek(0)
        assert list(f) == [b"pond\n", b"mill\n"]
