//! What takes bytes from outside, with what must hold for any bytes. Each entry panics when it does not.

use bytes::Bytes;
use serde_json::{Map, Value};
use tandem::discovery::{PodReader, parse_endpoints, read_documents};
use tandem::engines::Protocol;
use tandem::engines::errors::{MAX_MESSAGE_BYTES, error_message};
use tandem::engines::vllm::{self, Handoff};
use tandem::fleet::{Engine, ModelConfig};
use tandem::knobs::{KvConnector, PdKnobs};
use tandem::request::{Endpoint, ParsedBody};
use tandem::response::{AnswerKind, AnswerWatch, Api, Usage};
use tandem::scrape::parse_page;

/// The name of an entry, and the entry.
pub type Entry = (&'static str, fn(&[u8]));

/// All of them.
pub const ALL: [Entry; 5] = [
    ("body", body),
    ("answer", answer),
    ("handoff", handoff),
    ("manifests", manifests),
    ("metrics_page", metrics_page),
];

const HANDOFF: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e","remote_block_ids":[[1,2],[]],"remote_request_id":"r","remote_host":"localhost","remote_port":5600,"unknown":[18446744073709551617,1.10]}"#;

/// A request body: parse it for each endpoint and make all bodies of the legs.
pub fn body(data: &[u8]) {
    let raw = Bytes::copy_from_slice(data);
    for endpoint in Endpoint::ALL {
        let form = Some("multipart/form-data; boundary=x");
        let Ok(parsed) = ParsedBody::parse(endpoint, form, raw.clone()) else { continue };
        let plain = vllm::plain_body(&parsed);
        if endpoint.is_multipart() {
            assert_eq!(plain, raw, "a form is never touched");
            continue;
        }
        let answer = format!("{{\"kv_transfer_params\":{HANDOFF}}}");
        for connector in [KvConnector::Shfs, KvConnector::Nixl] {
            let prefill = vllm::prefill_body(&parsed, connector);
            let relay = vllm::decode_body(&parsed, connector, answer.as_bytes(), "fd00::1").expect("good");
            assert_eq!(relay.handoff, Handoff::Relayed);
            let decode = relay.body;
            // Deeply nested bodies are beyond this parser, not beyond the gateway.
            let (Some(client), Some(prefill), Some(decode)) = (object(&raw), object(&prefill), object(&decode)) else {
                continue;
            };
            let limit = &prefill[tandem::engines::limit_field(endpoint)];
            assert_eq!((limit, &prefill["stream"]), (&Value::from(1), &Value::from(false)));
            for gone in ["stream_options", "min_tokens"] {
                assert!(!prefill.contains_key(gone), "{gone}");
            }
            let (key, other) = match connector {
                KvConnector::Shfs => ("kv_transfer_params", "disagg_prefill_resp"),
                _ => ("disagg_prefill_resp", "kv_transfer_params"),
            };
            assert!(decode.contains_key(key) && !decode.contains_key(other));
            if connector == KvConnector::Shfs {
                assert_eq!(decode[key]["remote_host"], "fd00::1");
                assert_eq!(prefill[key]["do_remote_decode"], true);
            }
            same_but(&client, &decode, &vllm::HANDOFF_KEYS);
            let edited = [Protocol::VllmShfs.controlled_keys(), &vllm::HANDOFF_KEYS, &["max_output_tokens"]].concat();
            same_but(&client, &prefill, &edited);
        }
        if let (Some(client), Some(plain)) = (object(&raw), object(&plain)) {
            assert!(vllm::HANDOFF_KEYS.iter().all(|key| !plain.contains_key(*key)));
            same_but(&client, &plain, &vllm::HANDOFF_KEYS);
        }
    }
}

fn object(raw: &[u8]) -> Option<Map<String, Value>> {
    serde_json::from_slice(raw).ok()
}

/// Both say the same about every other key.
fn same_but(one: &Map<String, Value>, other: &Map<String, Value>, keys: &[&str]) {
    let rest = |map: &Map<String, Value>| {
        map.iter().filter(|(key, _)| !keys.contains(&key.as_str())).map(|(k, v)| (k.clone(), v.clone())).collect()
    };
    let (one, other): (Map<String, Value>, Map<String, Value>) = (rest(one), rest(other));
    assert_eq!(one, other);
}

/// An answer: whatever the pieces it comes in, the findings are the same. The first byte cuts the pieces.
pub fn answer(data: &[u8]) {
    let Some((seed, bytes)) = data.split_first() else { return };
    for kind in [AnswerKind::Stream, AnswerKind::Whole, AnswerKind::Opaque] {
        let whole = watch(kind, &[bytes]);
        let piece = usize::from(*seed % 7) + 1;
        let pieces: Vec<&[u8]> = bytes.chunks(piece).collect();
        assert_eq!(watch(kind, &pieces), whole, "{kind:?} in pieces of {piece}");
        let middle = bytes.len() * usize::from(*seed) / 256;
        assert_eq!(watch(kind, &[&bytes[..middle], &[], &bytes[middle..]]), whole, "{kind:?} cut at {middle}");
    }
}

fn watch(kind: AnswerKind, pieces: &[&[u8]]) -> (Option<Usage>, bool, bool, u64) {
    let mut watch = AnswerWatch::new(kind, Api::OpenAi);
    for piece in pieces {
        watch.feed(piece);
    }
    watch.finish();
    (watch.usage(), watch.done(), watch.error_event(), watch.bytes())
}

/// A prefill answer: merged, left out, or refused; and read as an error.
pub fn handoff(data: &[u8]) {
    let client =
        Bytes::from_static(br#"{"model":"m","prompt":"x","kv_transfer_params":{"a":1},"seed":9007199254740993}"#);
    let parsed = ParsedBody::parse(Endpoint::Completions, None, client).expect("a good body");
    for connector in [KvConnector::Shfs, KvConnector::Nixl] {
        let Ok(relay) = vllm::decode_body(&parsed, connector, data, "10.0.0.1") else { continue };
        let (decode, handoff) = (relay.body, relay.handoff);
        let text = std::str::from_utf8(&decode).expect("text");
        assert!(text.contains("\"seed\":9007199254740993"), "{text}");
        let Some(object) = object(&decode) else { continue };
        let params = object.get("kv_transfer_params");
        assert_eq!(params.is_some(), connector == KvConnector::Shfs && handoff == Handoff::Relayed);
        if let Some(params) = params {
            assert_eq!(params["remote_host"], "10.0.0.1");
            assert_eq!(params["do_remote_prefill"], true);
        }
    }
    assert!(
        error_message(data)
            .is_none_or(|message| !message.is_empty() && message.len() <= MAX_MESSAGE_BYTES + "...".len())
    );
}

/// Files of manifests, of endpoints, and the annotation inside.
pub fn manifests(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let documents = read_documents(text);
    let mut reader = PodReader::new(PdKnobs::default().into());
    for manifest in &documents.pods {
        let Some(spec) = reader.read(manifest).spec else { continue };
        assert!(!spec.model.is_empty() && !spec.key.name.is_empty());
        assert!(spec.port > 0 && spec.metric_port > 0);
        let dialled = format!("http://{}/", spec.address());
        let host_only = !spec.host.contains(['/', '@', '?', '#', ' ']);
        assert!(host_only, "{dialled}");
    }
    let _ = parse_endpoints(text);
    let (config, _) = ModelConfig::parse(text, &PdKnobs::default());
    for profile in config.iter().flat_map(|config| config.profiles.values()) {
        let knobs = &profile.knobs;
        assert!(knobs.decode_weight_running > 0.0 && knobs.decode_score_ratio.is_finite());
        assert!(knobs.min_match_pct <= 100 && !knobs.prefill_request_timeout.is_zero());
    }
}

/// A page of engine metrics.
pub fn metrics_page(data: &[u8]) {
    for engine in [Engine::Vllm, Engine::Sglang, Engine::Trtllm, Engine::Other] {
        let page = parse_page(data, engine, "m");
        let values = [
            page.running,
            page.waiting,
            page.prefill_prealloc_queue,
            page.decode_prealloc_queue,
            page.kv_usage,
            page.generation_tps,
            page.prompt_tps,
            page.generation_tokens,
            page.prompt_tokens,
            page.prefill_seconds_mean,
        ];
        assert!(values.into_iter().flatten().all(|value| value >= 0.0), "{page:?}");
        assert!(page.kv_usage.is_none_or(|usage| usage <= 1.0), "{page:?}");
    }
}
