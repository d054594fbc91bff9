//! Clients that leave before their texts have ended.

use crate::asking::{address, send};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// What a figure of the server's is now.
fn figure(name: &str) -> f64 {
    let (status, figures) =
        send("GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    assert_eq!(status, 200);
    let name = format!("{name}{{model_name=\"demo\"}} ");
    let line = figures.lines().find_map(|line| line.strip_prefix(name.as_str()));
    line.unwrap_or_else(|| panic!("no {name} in {figures}")).trim().parse().unwrap()
}

#[test]
fn a_client_that_leaves_frees_its_places() {
    for streams in [true, false] {
        // Minutes of work, if nobody stopped it.
        let request = json!({"model": "demo", "prompt": "Once", "max_tokens": 2000, "n": 128,
            "ignore_eos": true, "temperature": 1, "stream": streams});
        let body = request.to_string();
        let length = body.len();
        let mut client = TcpStream::connect(address()).unwrap();
        let head =
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
        write!(client, "{head}\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        if streams {
            client.read_exact(&mut [0; 1000]).unwrap();
        }
        let begun = Instant::now();
        while figure("vllm:num_requests_running") < 100.0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is not written");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(client);
        let left = Instant::now();
        while figure("vllm:num_requests_running") + figure("vllm:num_requests_waiting") > 20.0 {
            assert!(left.elapsed() < Duration::from_secs(60), "it is still written");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
