//! The front over real sockets, with peers on both sides that misbehave.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::serve;
use crate::clock::Clock;
use crate::drive::{Driver, Stops};
use crate::exchange::{World, WorldSeeds};
use crate::fleet::{Engine, Fleet, PodKey, PodSpec, Role, Snapshot, build};
use crate::knobs::{Environment, Knobs, Secret};
use crate::rng::Seeds;
use crate::telemetry::{FleetGauges, Metrics, Tracer};
use crate::tls::Incoming;

/// Generous: only reached when something is broken.
const SOON: Duration = Duration::from_secs(30);
/// A limit, in tests with paused time.
const LIMIT: Duration = Duration::from_secs(20);

struct Nothing;

impl Environment for Nothing {
    fn get(&self, _name: &str) -> Option<String> {
        None
    }
}

fn pod(address: SocketAddr) -> PodSpec {
    PodSpec {
        key: PodKey { namespace: Arc::from("ns"), name: Arc::from("pod") },
        uid: Arc::from("uid"),
        restarts: 0,
        model: Arc::from("m"),
        host: Arc::from(address.ip().to_string()),
        port: address.port(),
        metric_port: address.port(),
        engine: Engine::Vllm,
        kv_connector: None,
        bootstrap_port: 8998,
        role: Role::Other,
        roleset: None,
        replica_index: None,
        serves_http: true,
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::new(BTreeMap::new()),
        config: None,
        also: Vec::new(),
        claim: None,
    }
}

/// A front before one pod, which the test plays itself.
struct Front {
    world: Arc<World>,
    address: SocketAddr,
    pod: TcpListener,
    tasks: TaskTracker,
    cut: CancellationToken,
}

async fn front(change: impl FnOnce(&mut Knobs)) -> Front {
    let (mut knobs, _) = Knobs::read(&Nothing).unwrap();
    change(&mut knobs);
    let pod_listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let fleet = Fleet::default();
    fleet.store(build(&Snapshot::default(), &[pod(pod_listener.local_addr().unwrap())], &mut 0));
    let world = Arc::new(World::new(
        Arc::new(knobs),
        Arc::new(fleet),
        Arc::new(Metrics::new("gateway")),
        WorldSeeds::default(),
    ));
    let (tasks, cut) = (TaskTracker::new(), CancellationToken::new());
    let tracer = Tracer::off();
    let driver = Driver::new(
        Arc::clone(&world),
        Clock::system(),
        Seeds::new(1),
        tracer,
        tasks.clone(),
        Stops { idle: CancellationToken::new(), cut: cut.clone() },
    );
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let models = Arc::new(|id: Option<&str>| match id {
        None | Some("org/m") => (StatusCode::OK, Bytes::from_static(b"{}")),
        Some(_) => (StatusCode::NOT_FOUND, Bytes::from_static(b"{}")),
    });
    tasks.spawn(serve(
        Incoming::new(listener, None),
        Arc::new(driver),
        models,
        tasks.clone(),
        CancellationToken::new(),
    ));
    Front { world, address, pod: pod_listener, tasks, cut }
}

impl Front {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A connection on which these bytes were sent.
    async fn send(&self, bytes: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(bytes.as_ref()).await.unwrap();
        stream
    }

    /// The pod takes one request and says this.
    async fn pod_says(&self, answer: &str) -> (TcpStream, String) {
        let (mut stream, _) = self.pod.accept().await.unwrap();
        let request = read_until(&mut stream, |text| text.ends_with('}')).await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        (stream, request)
    }

    /// Waits until no request is left, and checks that none left anything.
    async fn quiet(&self) {
        let all_gone = async {
            while self.world.streams.used() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(SOON, all_gone).await.expect("a request is left");
        assert_eq!(self.world.buffered.used(), 0);
        for pod in self.world.fleet.load().pods() {
            assert_eq!(pod.state.load.view().in_flight(), 0);
        }
    }

    fn metric(&self, line: &str) -> bool {
        let page = self.world.metrics.render(&FleetGauges::default(), crate::clock::Tick(1));
        page.lines().any(|known| known == line)
    }
}

/// Reads until `enough`, or up to the peer's close.
async fn read_until(stream: &mut TcpStream, enough: impl Fn(&str) -> bool) -> String {
    let mut bytes = Vec::new();
    let read = async {
        while !enough(&String::from_utf8_lossy(&bytes)) {
            if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                break;
            }
        }
    };
    tokio::time::timeout(SOON, read).await.expect("the peer sends or closes");
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn read_to_close(stream: &mut TcpStream) -> String {
    read_until(stream, |_| false).await
}

const BODY: &str = r#"{"model":"m","prompt":"hello"}"#;

fn post(headers: &str, body: &str) -> String {
    format!("POST /v1/completions HTTP/1.1\r\nhost: gateway\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_is_given_up() {
    let front = front(|knobs| knobs.limits.front_body_timeout = LIMIT).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30\r\n\r\n";
    let mut stream = front.send(head).await;
    // A byte now and then does not help: the limit is on the whole.
    let trickle = async {
        for byte in BODY.as_bytes() {
            tokio::time::sleep(LIMIT * 9 / 10).await;
            if stream.write_all(&[*byte]).await.is_err() {
                break;
            }
        }
        read_to_close(&mut stream).await
    };
    let answer = trickle.await;
    // Whoever goes on sending may get a reset in place of the answer; the limit counts.
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");
    front.quiet().await;
    assert!(front.metric("tandem_rejected_total{limit=\"front_body_time\"} 1"));

    let mut stream = front.send(head).await;
    let answer = read_until(&mut stream, |text| text.ends_with('}')).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert!(answer.contains("the request body did not arrive in time"), "{answer}");
    front.quiet().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_never_reads_loses_its_pod() {
    let front = front(|knobs| knobs.limits.front_stall_timeout = LIMIT).await;
    let _client = front.send(post("", BODY)).await;
    let (mut pod, _) = front.pod_says("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let talk = async { while pod.write_all(chunk.as_bytes()).await.is_ok() {} };
    tokio::time::timeout(SOON, talk).await.expect("the pod is let go");
    front.quiet().await;
    assert!(front.metric("tandem_rejected_total{limit=\"front_stall\"} 1"));
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_a_client_that_never_reads() {
    let front = front(|_| {}).await;
    let mut client = front.send(post("", BODY)).await;
    let (mut pod, _) = front.pod_says("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    // Until the pipes are full.
    while let Ok(Ok(())) = tokio::time::timeout(Duration::from_millis(500), pod.write_all(chunk.as_bytes())).await {}
    front.cut.cancel();
    front.quiet().await;
    let answer = read_to_close(&mut client).await;
    assert!(!answer.ends_with("0\r\n\r\n"), "an answer that was cut must not look complete");
}

#[tokio::test]
async fn r12_an_answer_that_breaks_off_looks_so() {
    for (head, rest) in [("content-length: 10", "12345"), ("transfer-encoding: chunked", "5\r\n12345\r\n")] {
        let front = front(|_| {}).await;
        let mut client = front.send(post("", BODY)).await;
        let (pod, _) = front.pod_says(&format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{rest}")).await;
        drop(pod);
        let answer = read_to_close(&mut client).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("12345"), "{answer}");
        assert!(!answer.ends_with("0\r\n\r\n"), "{answer}");
        front.quiet().await;
    }
}

#[tokio::test]
async fn what_concerns_the_pods_connection_stays_there() {
    let front = front(|_| {}).await;
    let mut client = front.send(post("connection: close\r\n", BODY)).await;
    let head = "connection: keep-alive, x-hop\r\nkeep-alive: timeout=5\r\nx-hop: 1\r\ntrailer: x-sum\r\nx-kept: 1";
    let answer =
        format!("HTTP/1.1 200 OK\r\n{head}\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nx-sum: 1\r\n\r\n");
    let (_pod, request) = front.pod_says(&answer).await;
    assert!(!request.contains("connection: close"), "{request}");
    let answer = read_to_close(&mut client).await;
    for gone in ["keep-alive", "x-hop", "x-sum"] {
        assert!(!answer.contains(gone), "{gone}: {answer}");
    }
    assert!(answer.contains("x-kept: 1\r\n") && answer.ends_with("2\r\n{}\r\n0\r\n\r\n"), "{answer}");
    front.quiet().await;
}

#[tokio::test]
async fn answers_without_a_body_and_interim_answers() {
    for (answer, expected) in [
        ("HTTP/1.1 204 No Content\r\n\r\n", "HTTP/1.1 204 "),
        ("HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n", "HTTP/1.1 304 "),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 200 "),
        ("HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 200 "),
    ] {
        let front = front(|_| {}).await;
        let mut client = front.send(post("connection: close\r\n", BODY)).await;
        let (_pod, _) = front.pod_says(answer).await;
        let answer = read_to_close(&mut client).await;
        assert!(answer.starts_with(expected) && answer.ends_with("\r\n\r\n"), "{answer}");
        front.quiet().await;
    }
}

#[tokio::test]
async fn a_pod_that_switches_protocols_or_talks_nonsense_failed() {
    for answer in [
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nhello",
        "220 mail.example ESMTP\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n12",
        "",
    ] {
        let front = front(|_| {}).await;
        let mut client = front.send(post("connection: close\r\n", BODY)).await;
        let (pod, _) = front.pod_says(answer).await;
        drop(pod);
        let text = read_to_close(&mut client).await;
        assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("x-error-pd-decode: true"), "{answer}: {text}");
        front.quiet().await;
    }
}

#[tokio::test]
async fn odd_requests_get_one_clear_answer() {
    let many = "x-many: 1\r\n".repeat(120);
    let long = format!("x-long: {}\r\n", "x".repeat(200_000));
    for (request, expected) in [
        ("GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "HTTP/1.1 405 "),
        ("OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "HTTP/1.1 405 "),
        ("OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "HTTP/1.1 501 "),
        ("POST //v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}".to_owned(), "HTTP/1.1 501 "),
        ("POST /v1%2fcompletions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}".to_owned(), "HTTP/1.1 501 "),
        ("POST /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), "HTTP/1.1 400 "),
        (post("", "[]"), "HTTP/1.1 400 "),
        (post("", r#"{"model":"zz","prompt":"x"}"#), "HTTP/1.1 400 "),
        (post("transfer-encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"), "HTTP/1.1 400 "),
        (post("transfer-encoding: gzip\r\n", BODY), "HTTP/1.1 400 "),
        (post("content-length: 7\r\n", BODY), "HTTP/1.1 400 "),
        (post("x-bad\u{0}: 1\r\n", BODY), "HTTP/1.1 400 "),
        (post(&many, BODY), "HTTP/1.1 431 "),
        (post(&long, BODY), "HTTP/1.1 431 "),
        ("GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), "HTTP/1.1 200 "),
        ("GET /v1/models/org/m HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), "HTTP/1.1 200 "),
        ("GET /v1/models/org%2Fm HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), "HTTP/1.1 200 "),
        ("GET /v1/models/other HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), "HTTP/1.1 404 "),
    ] {
        let front = front(|_| {}).await;
        let mut client = front.send(request.replacen("host", "connection: close\r\nhost", 1)).await;
        let line = request.lines().next().unwrap();
        let answer = read_to_close(&mut client).await;
        assert!(answer.starts_with(expected), "{line}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{line}: {answer}");
        front.quiet().await;
    }
    let front = front(|_| {}).await;
    let mut client = front.send("HEAD /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let answer = read_to_close(&mut client).await;
    assert!(answer.starts_with("HTTP/1.1 405 ") && answer.ends_with("\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn a_full_uri_or_another_host_does_not_steer_the_request() {
    for line in ["POST http://evil.example:1/v1/completions?a=//b HTTP/1.1", "POST /v1/completions?a=//b HTTP/1.1"] {
        let front = front(|_| {}).await;
        let head = format!("{line}\r\nhost: evil.example\r\nx-forwarded-host: e\r\nconnection: close\r\n");
        let mut client = front.send(format!("{head}content-length: {}\r\n\r\n{BODY}", BODY.len())).await;
        let (_pod, request) = front.pod_says("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
        assert!(request.starts_with("POST /v1/completions?a=//b HTTP/1.1\r\n"), "{request}");
        let host = format!("host: {}\r\n", front.pod.local_addr().unwrap());
        assert!(request.contains(&host) && !request.contains("evil"), "{request}");
        assert!(read_to_close(&mut client).await.ends_with("{}"));
        front.quiet().await;
    }
}

#[tokio::test]
async fn a_body_is_asked_for_only_when_it_is_wanted() {
    let front = front(|knobs| knobs.auth_bearer_token = Some(Secret::new("k"))).await;
    let head = |key: &str| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nexpect: 100-continue\r\n\
             content-length: {}\r\n\r\n",
            BODY.len()
        )
    };
    let mut refused = front.send(head("wrong")).await;
    let answer = read_until(&mut refused, |text| text.ends_with('}')).await;
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");

    let mut wanted = front.send(head("k")).await;
    assert_eq!(read_until(&mut wanted, |text| text.ends_with("\r\n\r\n")).await, "HTTP/1.1 100 Continue\r\n\r\n");
    wanted.write_all(BODY.as_bytes()).await.unwrap();
    let (_pod, request) = front.pod_says("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(!request.contains("expect"), "{request}");
    assert!(read_until(&mut wanted, |text| text.ends_with("{}")).await.starts_with("HTTP/1.1 200 "));
    front.quiet().await;
}

#[tokio::test]
async fn r07_a_refusal_reaches_a_client_that_is_still_sending() {
    const LENGTH: usize = 32 << 20;
    let front = front(|knobs| knobs.limits.max_body_bytes = LENGTH - 1).await;
    for (path, status) in [("/v1/completions", "413"), ("/v1/nothing", "501")] {
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\n");
        for framing in [format!("content-length: {LENGTH}"), "transfer-encoding: chunked".to_owned()] {
            let mut client = front.send(format!("{head}{framing}\r\n\r\n")).await;
            let chunked = framing.contains("chunked");
            if chunked {
                client.write_all(format!("{LENGTH:x}\r\n").as_bytes()).await.unwrap();
            }
            // It does not read before it has sent everything.
            client.write_all(&vec![b' '; LENGTH]).await.expect("the whole body is taken");
            if chunked {
                client.write_all(b"\r\n0\r\n\r\n").await.unwrap();
            }
            let answer = read_until(&mut client, |text| text.ends_with('}')).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            // The connection is as good as before.
            client.write_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            assert!(read_until(&mut client, |text| text.ends_with("{}")).await.starts_with("HTTP/1.1 200 "));
            front.quiet().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_client_cannot_send_for_ever() {
    let front = front(|_| {}).await;
    let mut client = front.send("POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n").await;
    let trickle = async {
        while client.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    #[allow(clippy::disallowed_methods, reason = "real sockets live in real time")]
    let started = tokio::time::Instant::now();
    tokio::time::timeout(Duration::from_mins(10), trickle).await.expect("it is cut off");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    // One that has stopped sending is let go sooner.
    let mut client = front.send("POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n").await;
    #[allow(clippy::disallowed_methods, reason = "real sockets live in real time")]
    let started = tokio::time::Instant::now();
    assert!(read_to_close(&mut client).await.starts_with("HTTP/1.1 501 "));
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    front.quiet().await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_one_after_the_other() {
    let front = front(|_| {}).await;
    let mut client = front.send(post("", BODY) + &post("connection: close\r\n", BODY)).await;
    let (_first, _) = front.pod_says("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfirst").await;
    let second = async {
        // The pod's connection may be used again or not; either way the second request comes after the first answer.
        let text = read_until(&mut client, |text| text.ends_with("first")).await;
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    };
    second.await;
    front.cut.cancel();
    assert!(read_to_close(&mut client).await.starts_with("HTTP/1.1 503 "));
    front.quiet().await;
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_with_it() {
    for half_close in [true, false] {
        // While the body is on its way; while the pod computes; while it answers.
        for (sent, answer) in [
            (post("", BODY).replace(BODY, "{"), None),
            (post("", BODY), Some("")),
            (post("", BODY), Some("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")),
        ] {
            let front = front(|_| {}).await;
            let mut client = front.send(&sent).await;
            let mut pod = match answer {
                Some(answer) => Some(front.pod_says(answer).await.0),
                None => None,
            };
            if answer.is_some_and(|answer| !answer.is_empty()) {
                read_until(&mut client, |text| text.contains("{}")).await;
            }
            if half_close {
                client.shutdown().await.unwrap();
            } else {
                client.set_zero_linger().unwrap();
                drop(client);
            }
            if let Some(pod) = &mut pod {
                read_to_close(pod).await;
            }
            front.quiet().await;
        }
    }
}

#[tokio::test]
async fn connections_are_counted_and_given_back() {
    let front = front(|knobs| knobs.limits.max_front_connections = 1).await;
    let models = "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n";
    let mut first = front.send(models).await;
    assert!(read_until(&mut first, |text| text.ends_with("{}")).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(read_to_close(&mut front.connect().await).await, "");
    assert!(front.metric("tandem_rejected_total{limit=\"front_connections\"} 1"));
    drop(first);
    let again = async {
        loop {
            let mut next = front.connect().await;
            let _ = next.write_all(models.as_bytes()).await;
            if read_until(&mut next, |text| text.ends_with("{}")).await.starts_with("HTTP/1.1 200 ") {
                return;
            }
        }
    };
    tokio::time::timeout(SOON, again).await.expect("the place is given back");
    assert!(!front.tasks.is_empty());
}
