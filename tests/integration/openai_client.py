"""Uses the gateway as its users do: with the official OpenAI client.

Called with the base URL of one way in, the API key, and the name of a model that exists but has no ready pod. Any
failure is an exception, and so the exit status.
"""

import sys

import openai

BASE, KEY, UNREADY = sys.argv[1:]
MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Say something in 日本語, please. 👍"},
]
PROMPT = "Once upon a time"
TOKENS = 17


def client(key=KEY):
    # Retries would hide a first answer that is wrong.
    return openai.OpenAI(base_url=f"{BASE}/v1", api_key=key, max_retries=0, timeout=60)


def raises(kind, status, call):
    try:
        call()
    except openai.APIStatusError as error:
        assert type(error) is kind, f"{type(error)} instead of {kind}: {error}"
        assert error.status_code == status, error
        assert isinstance(error.body, dict) and error.body["message"], error.body
        return error
    raise AssertionError(f"no {kind}")


def check_stream(chunks, text_of, include_usage):
    text, finish, usage = "", None, None
    for chunk in chunks:
        assert chunk.model == "m" and chunk.id, chunk
        assert usage is None, "nothing comes after the usage"
        if chunk.choices:
            assert chunk.usage is None, chunk
            assert finish is None, "nothing comes after the finish reason"
            text += text_of(chunk.choices[0]) or ""
            finish = chunk.choices[0].finish_reason
        else:
            usage = chunk.usage
    assert finish == "length", finish
    assert (usage is not None) == include_usage, usage
    if include_usage:
        assert usage.completion_tokens == TOKENS and usage.prompt_tokens > 0, usage
        assert usage.total_tokens == usage.prompt_tokens + TOKENS, usage
    return text


def chat(api):
    create = api.chat.completions.create
    whole = create(model="m", messages=MESSAGES, max_tokens=TOKENS)
    assert whole.usage.completion_tokens == TOKENS, whole
    assert whole.choices[0].finish_reason == "length", whole
    text = whole.choices[0].message.content
    assert text
    for options in ({}, {"include_usage": True}):
        extra = {"stream_options": options} if options else {}
        chunks = create(model="m", messages=MESSAGES, max_tokens=TOKENS, stream=True, **extra)
        assert check_stream(chunks, lambda choice: choice.delta.content, bool(options)) == text
    # The helper that accumulates a stream needs every event to be well formed.
    with api.chat.completions.stream(model="m", messages=MESSAGES, max_completion_tokens=TOKENS) as stream:
        stream.until_done()
        assert stream.current_completion_snapshot.choices[0].message.content == text
    several = create(model="m", messages=MESSAGES, max_tokens=TOKENS, n=2)
    assert len(several.choices) == 2, several
    raw = api.chat.completions.with_raw_response.create(model="m", messages=MESSAGES, max_tokens=1)
    assert raw.headers["target-pod"] == "d0" and raw.headers["prefill-target-pod"] == "p0", raw.headers
    assert raw.headers["request-id"], raw.headers


def completions(api):
    create = api.completions.create
    whole = create(model="m", prompt=PROMPT, max_tokens=TOKENS)
    assert whole.usage.completion_tokens == TOKENS, whole
    text = whole.choices[0].text
    assert text
    for options in ({}, {"include_usage": True}):
        extra = {"stream_options": options} if options else {}
        chunks = create(model="m", prompt=PROMPT, max_tokens=TOKENS, stream=True, **extra)
        assert check_stream(chunks, lambda choice: choice.text, bool(options)) == text
    assert create(model="m", prompt=[PROMPT], max_tokens=TOKENS).choices[0].text == text
    assert len(create(model="m", prompt=[[1, 2], [3]], max_tokens=1).choices) == 2


def leave_early(api):
    chunks = api.chat.completions.create(model="m", messages=MESSAGES, max_tokens=1000, stream=True)
    next(iter(chunks))
    chunks.close()


def errors(api):
    create = api.chat.completions.create
    unknown = raises(openai.BadRequestError, 400, lambda: create(model="nobody", messages=MESSAGES))
    assert unknown.code == "model_not_found" and unknown.param == "model", unknown.body
    assert unknown.type == "invalid_request_error", unknown.body
    assert unknown.response.headers["x-error-no-model-backends"] == "nobody", unknown.response.headers
    for stream in (False, True):
        wrong = raises(
            openai.AuthenticationError,
            401,
            lambda: client("wrong").chat.completions.create(model="m", messages=MESSAGES, stream=stream),
        )
        assert wrong.code == "invalid_api_key" and wrong.type == "authentication_error", wrong.body
        gone = raises(
            openai.InternalServerError, 503, lambda: create(model=UNREADY, messages=MESSAGES, stream=stream)
        )
        assert gone.code == "service_unavailable" and gone.type == "overloaded_error", gone.body
    # What the engine refuses is raised as if there were no gateway.
    refused = raises(openai.BadRequestError, 400, lambda: create(model="m", messages=MESSAGES, temperature=-1))
    assert "temperature" in refused.body["message"], refused.body
    long = [{"role": "user", "content": "x" * 600_000}]
    refused = raises(openai.BadRequestError, 400, lambda: create(model="m", messages=long))
    assert "maximum context length" in refused.body["message"], refused.body
    raises(openai.BadRequestError, 400, lambda: create(model="m", messages=[], max_tokens=1))


def main():
    api = client()
    assert "m" in [model.id for model in api.models.list()]
    chat(api)
    completions(api)
    leave_early(api)
    errors(api)
    print("all is well")


main()
