//! The engine as a program sees it: control paths, records, command line.

use crate::client::{Client, get, post, within};
use clap::{CommandFactory, Parser};
use tandem_sim::cli::SimArgs;
use tandem_sim::{End, EngineConfig, Role, start};

const TEXT: &str = "/v1/completions";
const BODY: &str = r#"{"prompt":"x","max_tokens":2}"#;

#[tokio::test]
async fn everything_about_a_request_is_recorded() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    let headers = [("traceparent", "00-1-2-01"), ("X-Request-Id", "r"), ("x-twice", "1"), ("x-twice", "2")];
    client.post("/v1/completions?x=1&y", &headers, BODY).await;
    client.answer().await;
    get(engine.address(), "/health").await;
    within(engine.wait_until(|engine| engine.records()[0].end.is_some())).await;
    let records = engine.records();
    assert_eq!(records.len(), 1, "probes are not recorded");
    let record = &records[0];
    assert_eq!(
        (record.method.as_str(), record.path.as_str(), &record.body[..]),
        ("POST", "/v1/completions?x=1&y", BODY.as_bytes())
    );
    assert_eq!((record.header("traceparent"), record.header("x-request-id")), (Some("00-1-2-01"), Some("r")));
    assert_eq!(record.headers.iter().filter(|(name, _)| name == "x-twice").count(), 2);
    assert_eq!(
        (record.status, record.ended(), record.json()["max_tokens"].as_u64()),
        (Some(200), Some(End::Completed), Some(2))
    );
    assert!(record.end.unwrap().0 >= record.received_at);
    engine.clear_records();
    assert!(engine.records().is_empty());
    let probing = start(EngineConfig { record_probes: true, ..EngineConfig::combined("m") }).await.unwrap();
    get(probing.address(), "/metrics").await;
    assert_eq!(probing.records_for("/metrics").len(), 1);
}

#[tokio::test]
async fn live_requests_that_share_an_id_are_noted() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let hold = engine.hold();
    let mut clients = [Client::connect(engine.address()).await, Client::connect(engine.address()).await];
    for (number, client) in clients.iter_mut().enumerate() {
        client.post(TEXT, &[("x-request-id", "same")], BODY).await;
        within(hold.wait_for(number + 1)).await;
    }
    assert_eq!(engine.records().iter().map(|record| record.duplicate_id).collect::<Vec<_>>(), [false, true]);
    assert_eq!(engine.stats().duplicate_ids, 1);
    hold.release();
    for mut client in clients {
        assert_eq!(client.answer().await.json()["id"], "cmpl-same");
    }
}

#[tokio::test]
async fn programs_control_an_engine_over_http() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let at = engine.address();
    assert_eq!(post(at, "/sim/faults", r#"{"path":"/v1/","answer":{"status":418,"body":["tea"]}}"#).await.status, 200);
    assert_eq!(post(at, "/sim/faults", r#"{"oops":1}"#).await.status, 400);
    assert_eq!(post(at, TEXT, BODY).await.status, 418);
    assert_eq!(post(at, "/sim/hold", "").await.status, 200);
    let mut client = Client::connect(at).await;
    client.post(TEXT, &[], BODY).await;
    within(engine.wait_until(|engine| engine.stats().held == 1)).await;
    assert_eq!(get(at, "/sim/stats").await.json()["held"], 1);
    assert_eq!(post(at, "/sim/release", "").await.status, 200);
    assert_eq!(client.answer().await.status, 200);
    within(engine.wait_until(|engine| engine.records().iter().all(|record| record.end.is_some()))).await;
    let records = get(at, "/sim/records").await.json();
    assert_eq!(records.as_array().map(Vec::len), Some(2));
    assert_eq!(
        (&records[1]["body"], &records[1]["end"], &records[1]["status"]),
        (&BODY.into(), &"completed".into(), &200.into())
    );
    assert_eq!(get(at, "/sim/violations").await.body, "[]");
    let mut client = Client::connect(at).await;
    client.send("DELETE", "/sim/records", &[], "").await;
    client.answer().await;
    assert_eq!(get(at, "/sim/records").await.body, "[]");
    assert_eq!(get(at, "/sim/nothing").await.status, 404);
    let mut client = Client::connect(at).await;
    client.post("/sim/kill", &[], "").await;
    within(engine.ended()).await;
}

#[derive(Parser)]
struct Program {
    #[command(flatten)]
    sim: SimArgs,
}

#[test]
fn the_command_line_describes_an_engine() {
    let parse = |text: &str| Program::try_parse_from(text.split(' ')).map(|program| program.sim.config());
    let config = parse("sim --role decode --model x --port 9 --speed 4 --decode-ms 8 --lease-seconds 2.5 --lenient")
        .unwrap()
        .unwrap();
    assert_eq!((config.role, config.model.as_str(), config.port, config.strict), (Role::Decode, "x", 9, false));
    assert_eq!(config.timing.decode_step(1), std::time::Duration::from_millis(2));
    assert_eq!(config.lease, std::time::Duration::from_millis(2_500));
    assert!(parse("sim --engine nothing").is_err());
    assert!(parse("sim --lease-seconds -1").is_err() || parse("sim --lease-seconds=-1").unwrap().is_err());
    let help = Program::command().render_long_help().to_string();
    assert!(help.contains("model.aibrix.ai/name") && help.contains("podIP"), "{help}");
}
