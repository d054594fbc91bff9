use super::*;
use crate::random::SplitMix64;
use serde_json::json;
use std::io::Write;

fn read(name: &str, content: &[u8]) -> Result<Vec<(usize, Value)>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    Rows::open(&path)?
        .map(|row| {
            let row = row?;
            let value = match row.content {
                RowContent::Value(value) => value,
                RowContent::Text { text, last } => json!([text, last]),
            };
            Ok((row.line, value))
        })
        .collect()
}

fn error(name: &str, content: &str) -> String {
    let message = read(name, content.as_bytes()).unwrap_err().to_string();
    message.split_once(name).unwrap().1.to_string()
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

fn zstd(content: &[u8]) -> Vec<u8> {
    zstd::encode_all(content, 1).unwrap()
}

fn fixture(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/data");
    std::fs::read(Path::new(folder).join(name)).unwrap()
}

/// The same two records in every format.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let lines = "\u{feff}{\"prompt\": \"a, \\\"b\\\"\", \"completion\": \"é\\n1\"}\r\n\r\n{\"prompt\": \"c\", \"completion\": \"d\"}";
    let list = "\n[{\"prompt\": \"a, \\\"b\\\"\", \"completion\": \"é\\n1\"},\n {\"prompt\": \"c\", \"completion\": \"d\"}\n]\n";
    let csv = "\u{feff}prompt,completion\r\n\"a, \"\"b\"\"\",\"é\n1\"\r\nc,d\r\n";
    let tsv = "prompt\tcompletion\n\"a, \"\"b\"\"\"\t\"é\n1\"\nc\td\n";
    vec![
        ("a.jsonl", lines.into()),
        ("a.json", lines.into()),
        ("a", lines.into()),
        ("b.json", list.into()),
        ("b.jsonl", list.into()),
        ("a.csv", csv.into()),
        ("a.tsv", tsv.into()),
        ("a.jsonl.gz", gzip(lines.as_bytes())),
        // Compression goes by the content, so a wrong name does no harm.
        ("b.json", zstd(list.as_bytes())),
        ("a.csv.zst", zstd(csv.as_bytes())),
        ("a.jsonl.gz", [gzip(&lines.as_bytes()[..20]), gzip(&lines.as_bytes()[20..])].concat()),
        ("a.parquet", fixture("pairs-snappy.parquet")),
        ("a.parquet", fixture("pairs-zstd.parquet")),
        ("a.parquet", fixture("pairs-gzip.parquet")),
        ("a.parquet", fixture("pairs-lz4.parquet")),
        ("a.jsonl", fixture("pairs-snappy.parquet")),
    ]
}

#[test]
fn every_format_gives_the_same_rows() {
    let expected = [
        json!({"prompt": "a, \"b\"", "completion": "é\n1"}),
        json!({"prompt": "c", "completion": "d"}),
    ];
    for (name, content) in files() {
        let rows = read(name, &content).unwrap();
        let values: Vec<_> = rows.iter().map(|(_, value)| value.clone()).collect();
        assert_eq!(values, expected, "{name}");
    }
    let lines = |name: &str| {
        let (_, content) = files().into_iter().find(|(other, _)| *other == name).unwrap();
        read(name, &content).unwrap().iter().map(|(line, _)| *line).collect::<Vec<_>>()
    };
    assert_eq!(lines("a.jsonl"), [1, 3]);
    assert_eq!(lines("b.json"), [2, 3]);
    assert_eq!(lines("a.csv"), [2, 4]);
    assert_eq!(lines("a.parquet"), [1, 2]);
}

#[test]
fn lists_and_structs_of_parquet_become_lists_and_objects() {
    let rows = read("a.parquet", &fixture("chat.parquet")).unwrap();
    assert_eq!(rows.len(), 3);
    assert_eq!(
        rows[0].1,
        json!({
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
            "id": 7,
            "score": 0.5,
            "date": rows[0].1["date"],
            "raw": null,
        })
    );
    assert!(rows[0].1["date"].is_string());
    assert_eq!(rows[1].1["messages"], json!([{"role": "user", "content": null}]));
    assert_eq!(rows[2].1["messages"], Value::Null);
}

#[test]
fn text_comes_in_pieces_that_end_at_line_ends() {
    let line = "a line of some length\n";
    let text = line.repeat((3 << 20) / line.len());
    let rows = read("a.txt", text.as_bytes()).unwrap();
    assert_eq!(rows.len(), 3);
    let pieces: Vec<&str> = rows.iter().map(|(_, value)| value[0].as_str().unwrap()).collect();
    assert_eq!(pieces.concat(), text);
    assert!(pieces.iter().all(|piece| piece.ends_with('\n')));
    let last: Vec<bool> = rows.iter().map(|(_, value)| value[1].as_bool().unwrap()).collect();
    assert_eq!(last, [false, false, true]);
    assert_eq!(rows[1].0, 1 + pieces[0].lines().count());
    assert!(read("a.txt", b" \n\n").unwrap().is_empty());
}

#[test]
fn broken_tables_and_lists_are_named_by_their_line() {
    for (name, content, expected) in [
        ("a.csv", "a,b\n1,2\n3\n", ":3: the row has 1 fields and the header 2"),
        ("a.csv", "a,a\n1,2\n", ":1: the header has two columns named \"a\""),
        (
            "a.csv",
            "a;b\n1;2\n",
            ":1: the header is one column \"a;b\"; its fields seem to be separated by ';', expected commas",
        ),
        (
            "a.tsv",
            "a,b\n1,2\n",
            ":1: the header is one column \"a,b\"; its fields seem to be separated by ',', expected tabs",
        ),
        (
            "a.json",
            "[{\"a\": 1},\n\n{\"a\" 2}]",
            ":3: malformed JSON array: expected `:` at column",
        ),
        ("a.json", "[{\"a\": 1},\n", ":2: malformed JSON array: the file ends inside of the list"),
        ("a.json", "[1,]", ":1: malformed JSON array: a value is missing"),
        ("a.json", "[,1]", ":1: malformed JSON array: a value is missing"),
        ("a.json", "[1]\n2", ":2: malformed JSON array: there is something behind the list"),
        (
            "a.json",
            "{\n \"a\": 1\n}",
            ":1: malformed JSON at column 1: EOF while parsing an object; each line holds one whole record, or the file holds one list",
        ),
    ] {
        let message = error(name, content);
        assert!(message.starts_with(expected), "{content}: {message}");
    }
    let message = read("a.txt", b"a\n\xff\n").unwrap_err().to_string();
    assert!(message.contains("a.txt:2: the text is not UTF-8"), "{message}");
    assert_eq!(read("a.json", b"[ ]").unwrap(), []);
    assert_eq!(read("a.csv", b"a,b\n").unwrap(), []);
}

#[test]
fn a_row_without_end_is_refused() {
    let long = "a".repeat(3 * MAX_ROW_BYTES as usize);
    for (name, start) in [("a.json", "[\""), ("a.jsonl", "{\""), ("a.csv", "a\n"), ("a.txt", "")] {
        let message =
            read(name, &zstd(format!("{start}{long}").as_bytes())).unwrap_err().to_string();
        assert!(message.contains("is longer than 2 MiB"), "{name}: {message}");
    }
}

#[test]
fn mutated_files_never_panic() {
    let mut random = SplitMix64::new(11);
    for (name, content) in files().into_iter().chain([("a.parquet", fixture("chat.parquet"))]) {
        for _ in 0..60 {
            let mut mutated = content.clone();
            for _ in 0..1 + random.below(4) {
                let place = random.below(mutated.len() as u64) as usize;
                match random.below(4) {
                    0 => mutated.truncate(place.max(1)),
                    1 => mutated[place] = random.next_u64() as u8,
                    2 => mutated[place] ^= 1 << random.below(8),
                    _ => drop(mutated.drain(place..(place + 3).min(mutated.len()))),
                }
                if mutated.is_empty() {
                    mutated.push(b' ');
                }
            }
            let outcome = std::panic::catch_unwind(|| read(name, &mutated).map(|rows| rows.len()));
            assert!(outcome.is_ok(), "{name}: {mutated:?}");
        }
    }
}
