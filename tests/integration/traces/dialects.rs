//! The exact tree for each way in which two engines share a request, over both protocols.

use tandem_sim::{Engine, EngineConfig};

use super::{
    ANSWER, BODY, CHAT, DECODE, HEAD, INFERENCE, LOOKUP, OK, PARENT, PREFILL, Protocol, SELECT, STREAMED, UNSET,
    assert_attributes, chat, exporting, gathered, one, received, rendered, traceparent,
};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;
use crate::harness::otlp::Collector;

/// How a dialect looks in a trace.
struct Dialect {
    name: &'static str,
    engine: fn(EngineConfig) -> EngineConfig,
    env: &'static [(&'static str, &'static str)],
    provider: &'static str,
    /// Both legs at once.
    concurrent: bool,
    /// The path of the question that comes first, the first time.
    question: Option<&'static str>,
}

const DIALECTS: [Dialect; 5] = [
    Dialect { name: "vllm", engine: |config| config, env: &[], provider: "vllm", concurrent: false, question: None },
    Dialect {
        name: "mooncake",
        engine: EngineConfig::mooncake,
        env: &[],
        provider: "vllm",
        concurrent: true,
        question: Some("/query"),
    },
    Dialect {
        name: "sglang",
        engine: EngineConfig::sglang,
        env: &[],
        provider: "sglang",
        concurrent: true,
        question: None,
    },
    Dialect {
        name: "context_first",
        engine: EngineConfig::trtllm,
        env: &[],
        provider: "trtllm",
        concurrent: false,
        question: None,
    },
    Dialect {
        name: "generation_first",
        engine: EngineConfig::trtllm,
        env: &[("AIBRIX_TRT_SCHEDULE_STYLE", "generation_first")],
        provider: "trtllm",
        concurrent: true,
        question: Some("/server_info"),
    },
];

/// The trace context of the one leg at an engine.
fn leg(engine: &Engine) -> (String, String, String) {
    let legs = engine.records_where(|record| record.path.starts_with("/v1/"));
    assert_eq!(legs.len(), 1, "{legs:?}");
    received(&legs[0])
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_the_tree_of_every_dialect() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        for dialect in &DIALECTS {
            plays(dialect, protocol).await;
        }
    }
}

async fn plays(dialect: &Dialect, protocol: Protocol) {
    let collector = Collector::start().await;
    let fleet = exporting(&collector, protocol, dialect.env);
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::of(dialect.engine) }).await;
    let path = sandbox.paths().remove(0);
    for (number, stream) in [true, false].into_iter().enumerate() {
        sandbox.clear();
        let trace = format!("{:032x}", number + 1);
        let call = Call::post(&path, CHAT, chat(stream)).header("traceparent", &traceparent(&trace, PARENT));
        let answer = call.send().await;
        assert_eq!(answer.status, 200, "{}", dialect.name);
        assert!(answer.body().await.complete);
        let mut children = vec![PREFILL, DECODE];
        children.extend(if stream { &STREAMED[..] } else { &[HEAD, BODY, SELECT, ANSWER, INFERENCE] });
        let asked = dialect.question.filter(|_| number == 0);
        children.extend(asked.map(|_| LOOKUP));
        let spans = gathered(&collector, &trace, PARENT, &children).await;
        let context = |name: &str| (trace.clone(), one(&spans, name).span_id.clone(), "01".to_owned());
        assert_eq!(leg(&sandbox.prefill[0]), context(PREFILL), "{}", dialect.name);
        assert_eq!(leg(&sandbox.decode[0]), context(DECODE), "{}", dialect.name);
        let (prefill, decode) = (one(&spans, PREFILL), one(&spans, DECODE));
        for (span, pod) in [(prefill, "p0"), (decode, "d0")] {
            let expected = [
                ("gen_ai.provider.name", dialect.provider),
                ("k8s.pod.name", pod),
                ("http.response.status_code", "200"),
            ];
            assert_attributes(span, &expected);
            assert_eq!(span.status, UNSET);
        }
        assert_eq!(decode.start < prefill.end, dialect.concurrent, "{}:\n{}", dialect.name, rendered(&spans));
        if let Some(question) = asked {
            let lookup = one(&spans, LOOKUP);
            assert!(lookup.attributes["url.full"].ends_with(question), "{lookup:?}");
            assert_attributes(lookup, &[("http.request.method", "GET"), ("http.response.status_code", "200")]);
            assert!(lookup.end <= prefill.start, "{}", rendered(&spans));
        }
        assert_eq!(one(&spans, "tandem.request").status, OK);
    }
    assert!(collector.spans().iter().all(|span| span.name != "tandem.state_sync"), "nobody is told anything");
    sandbox.close().await;
}
