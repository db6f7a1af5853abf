use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::knobs::{MetricLabels, ScrapeKnobs};
use crate::scrape::{FetchError, HttpPages, PageSource as _};

fn pages(max_bytes: usize) -> HttpPages {
    let second = Duration::from_secs(1);
    let labels = MetricLabels::default();
    HttpPages::new(&ScrapeKnobs { interval: second, timeout: 20 * second, max_age: second, max_bytes, labels }, None)
}

/// Serves one connection with this answer to each request; gives back the address and the requests' first lines.
async fn server(address: &str, answer: &'static str) -> (String, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind(address).await.unwrap();
    let bound = listener.local_addr().unwrap().to_string();
    let (lines, received) = tokio::sync::mpsc::unbounded_channel();
    #[allow(clippy::disallowed_methods, reason = "a server that lives as long as its test")]
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut buffer = Vec::new();
        loop {
            let mut chunk = [0; 1024];
            let Ok(n @ 1..) = socket.read(&mut chunk).await else { return };
            buffer.extend_from_slice(&chunk[..n]);
            if buffer.ends_with(b"\r\n\r\n") {
                let text = String::from_utf8(std::mem::take(&mut buffer)).unwrap();
                let _ = lines.send(text.lines().next().unwrap().to_owned());
                if socket.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
        }
    });
    (bound, received)
}

#[tokio::test]
async fn r79_fetches_over_one_connection_also_from_ipv6() {
    for address in ["127.0.0.1:0", "[::1]:0"] {
        // Some build machines have no IPv6.
        if TcpListener::bind(address).await.is_err() && address.starts_with('[') {
            continue;
        }
        let (address, mut lines) = server(address, "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc").await;
        let pages = pages(3);
        for path in ["/metrics", "/prometheus/metrics"] {
            assert_eq!(pages.fetch(&address, path).await.unwrap(), "abc");
            assert_eq!(lines.recv().await.unwrap(), format!("GET {path} HTTP/1.1"));
        }
    }
}

#[tokio::test]
async fn what_is_no_page() {
    let (address, _lines) = server("127.0.0.1:0", "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(pages(9).fetch(&address, "/metrics").await, Err(FetchError::Status(http::StatusCode::NOT_FOUND)));
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n",
    ] {
        let (address, _lines) = server("127.0.0.1:0", answer).await;
        assert!(
            matches!(pages(3).fetch(&address, "/metrics").await, Err(FetchError::Body(_))),
            "longer than the limit"
        );
    }
    let (address, _lines) = server("127.0.0.1:0", "what?\r\n\r\n").await;
    assert!(matches!(pages(9).fetch(&address, "/metrics").await, Err(FetchError::Transport(_))));
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
    assert!(matches!(pages(9).fetch(&unused, "/metrics").await, Err(FetchError::Transport(_))));
    assert!(matches!(pages(9).fetch("not a host", "/metrics").await, Err(FetchError::Address(_))));
}
