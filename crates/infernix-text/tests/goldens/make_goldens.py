"""Writes expressions.json and templates.json: what Python's Jinja2 makes of each input.

The environment is the one transformers compiles chat templates in: immutable sandbox, trimmed and
left-stripped blocks, loop controls, its own tojson. Run with jinja2 >= 3.1.6 installed, from this folder.
The clock is fixed, since strftime_now would otherwise change the goldens.
"""

import datetime
import json
import pathlib

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent
NOW = datetime.datetime(2026, 3, 5, 7, 8, 9)


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: renders its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @jinja2.pass_eval_context
    def _body(self, context, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: NOW.strftime(f)
    return env


def render(source, context):
    try:
        return {"output": environment().from_string(source).render(**context)}
    except Exception as error:  # every failure must be a failure on our side, too
        return {"error": str(error) if type(error) is jinja2.exceptions.TemplateError else ""}


CONTEXT = {
    "s": "  Hello, World! <a href='x'>&\"  ",
    "word": "qwen",
    "uni": "Grüße 世界 🦀 e\u0301",
    "empty": "",
    "n": 7,
    "neg": -7,
    "f": 2.5,
    "big": 1e16,
    "small": 1e-05,
    "whole": 3.0,
    "huge": 9007199254740993,
    "yes": True,
    "no": False,
    "nil": None,
    "list": [3, 1, 2],
    "words": ["b", "A", "c"],
    "vacant": [],
    "map": {"z": 1, "a": {"k": [1, "two", None, True, 2.0, 1e20]}, "items": "shadow", "<&>'\"": "</script>\n\t\u2028é"},
    "people": [{"name": "Ann", "age": 3, "tag": None}, {"name": "bob", "age": 1}, {"name": "Cid", "age": 2, "tag": "x"}],
    "text": "line one\nline two\n\nline four\n",
    "json_args": '{"b": 1, "a": "x"}',
}

EXPRESSIONS = r"""
{{ map | tojson }}
{{ map | tojson(indent=2) }}
{{ map | tojson(indent=4, ensure_ascii=True) }}
{{ map | tojson(sort_keys=True) }}
{{ map | tojson(separators=(',', ':')) }}
{{ map | tojson(indent=1, separators=(',', ': '), sort_keys=true) }}
{{ uni | tojson(ensure_ascii=true) }}
{{ uni | tojson }}
{{ [] | tojson }}{{ {} | tojson(indent=2) }}{{ [[], {}] | tojson(indent=2) }}
{{ [1.0, 1e16, 1e-5, 0.1, -0.0, 123456789012345680.0, 1e15] | tojson }}
{{ (1, 2) | tojson }}
{{ none_such | tojson }}
{{ nil | tojson }} {{ yes | tojson }} {{ s | tojson }}
{{ {1: 2, none_key: 3} | tojson }}
{{ {1: 2, true: 3} | tojson }}
{{ huge }} {{ huge | tojson }}
{{ big }} {{ small }} {{ whole }} {{ f }} {{ 1e300 }} {{ 10 ** 20 }} {{ 1.0 * 100000 }}
{{ 'x' ~ big ~ small }}
{{ big | string }}
{{ [big, small, 'q', nil, yes] }}
{{ nil }} {{ yes }} {{ no }} {{ list }} {{ map }} {{ (1, 'a') }} {{ (1,) }} {{ () }}
{{ none_such }}|{{ none_such is defined }}|{{ none_such | default('d') }}|{{ nil | default('d') }}|{{ nil | default('d', true) }}|{{ empty | default('d', boolean=True) }}
{{ none_such.x }}
{{ map.nothing }}|{{ map.a.nothing }}|{{ map['z'] }}|{{ map.z }}
{{ map.nothing.deeper }}
{{ '%s' % word }}
{{ '%s has %d of %5.2f%%' % (word, n, f) }}
{{ '%(z)s!' % map }}
{{ '%05d|%-5s|%5s|%x|%X|%o|%e|%g|%r|%c' % (n, word, word, 255, 255, 8, f, 1e10, word, 'c') }}
{{ '%s' % nil }} {{ '%s' % yes }} {{ '%s' % [1, 'a'] }} {{ '%s' % (list,) }}
{{ '%s-%s' % (word | upper, word ~ '!') }}
{{ ('%s' % word) ~ ('%s' % n) }}
{{ 'a' ~ '%s' % word }}
{{ n % 4 }} {{ neg % 4 }} {{ n % -4 }} {{ f % 2 }} {{ neg % 2.5 }} {{ 7 * 3 % 4 }} {{ 7 % 4 * 3 }} {{ -7 % 4 }} {{ 2 ** 3 % 5 }} {{ n % 4 == 3 }} {{ (n + 1) % 4 }} {{ list[0] % 2 }}
{% if n % 2 == 1 and not n % 3 == 0 %}odd{% endif %}
{{ (n % 2 == 0) != (yes) }}
{{ '%d' % 'x' }}
{{ '%s %s' % (1,) }}
{{ 7 / 2 }} {{ 6 / 2 }} {{ 7 // 2 }} {{ neg // 2 }} {{ 7.0 // 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 1 == 1.0 }} {{ 'a' < 'b' }} {{ yes == 1 }} {{ yes + 1 }}
{{ 'a' * 3 }} {{ 3 * 'a' }} {{ [1] * 2 }} {{ [1] + [2] }} {{ 'a' + 'b' }} {{ 'a' 'b' }}
{{ 'a' + 1 }}
{{ 1 in list }} {{ 'ell' in s }} {{ 'z' in map }} {{ 9 not in list }} {{ 'x' in none_such }}
{{ 'x' in nil }}
{{ list[0] }} {{ list[-1] }} {{ list[1:] }} {{ list[::-1] }} {{ word[::-1] }} {{ uni[0:3] }} {{ list[:-1] }} {{ words[5:] }} {{ list[9] }}
{{ list.0 }} {{ word[0] }} {{ word[-1] }}
{{ word if yes }}|{{ word if no }}|{{ word if no else 'else' }}|{{ no or word }}|{{ yes and empty }}|{{ not word }}
{{ s.strip() }}|{{ s.lstrip() }}|{{ s.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcba'.lstrip('ab') }}|{{ 'abcba'.rstrip('ab') }}
{{ s.split() }} {{ s.split(',') }} {{ 'a,b,,c'.split(',', 1) }} {{ 'a,b,,c'.rsplit(',', 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ ' a  b '.split(None, 1) }} {{ 'a--b'.split('--')[-1] }}
{{ 'a b c'.split(maxsplit=1) }}
{{ word.split('') }}
{{ text.splitlines() }} {{ text.splitlines(True) }} {{ 'a\r\nb\x0bc'.splitlines() }}
{{ word.startswith('qw') }} {{ word.endswith('n') }} {{ word.startswith(('x', 'q')) }} {{ word.startswith('w', 1) }} {{ word.endswith(()) }}
{{ uni.upper() }} {{ 'ÀÉ'.lower() }} {{ 'hello wORLD it\'s o\'neil'.title() }} {{ 'hELLO wORLD'.capitalize() }} {{ 'aBc'.swapcase() }} {{ 'Straße'.casefold() }}
{{ 'hello wORLD it\'s o\'neil (foo-bar)' | title }} {{ 'hELLO' | capitalize }} {{ uni | upper }} {{ 'ABC' | lower }}
{{ 'aaa'.replace('a', 'b') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'abc'.replace('', '-') }} {{ 'aaa' | replace('a', 'b', 1) }} {{ 'aaa' | replace('a', 'b') }}
{{ ', '.join(words) }} {{ '-'.join('abc') }} {{ words | join }} {{ words | join(', ') }} {{ people | join('/', attribute='name') }} {{ [1, none_such, nil, 2.0] | join('|') }}
{{ ','.join(list) }}
{{ word.find('e') }} {{ word.find('x') }} {{ word.rfind('q') }} {{ word.index('w') }} {{ 'banana'.count('an') }} {{ uni.find('世') }}
{{ word.index('x') }}
{{ '12'.isdigit() }} {{ 'ab'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }} {{ ''.isspace() }} {{ 'AB'.isupper() }} {{ 'ab1'.islower() }} {{ '²'.isdigit() }} {{ '½'.isnumeric() }} {{ '12'.isdecimal() }} {{ ''.isdigit() }} {{ '1'.isupper() }}
{{ 'prefix_x'.removeprefix('prefix_') }} {{ 'x_suffix'.removesuffix('_suffix') }} {{ 'abc'.removeprefix('z') }}
{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} [{{ 'a'.ljust(3) }}] [{{ 'a'.rjust(3, '.') }}] [{{ 'ab'.center(5, '*') }}]
{{ 'a=b=c'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ 'abc'.partition('=') }} {{ 'abc'.rpartition('=') }}
{{ '{} and {}'.format(word, n) }} {{ '{0}{1}{0}'.format('a', 'b') }} {{ '{x:>5}|{y:.2f}'.format(x='r', y=f) }} {{ '{{}}'.format() }}
{{ '%s-%s' | format('a', 1) }}
{{ map.keys() | list }} {{ map.values() | list | length }} {{ map.items() | list | length }} {{ map.get('z') }} {{ map.get('q') }} {{ map.get('q', 'dflt') }}
{% for k, v in map.items() %}{{ k }}={{ v }};{% endfor %}
{% for k, v in map | items %}{{ k }};{% endfor %}
{% for k, v in map | dictsort %}{{ k }};{% endfor %}
{% for k, v in {'b': 1, 'A': 2} | dictsort(true) %}{{ k }};{% endfor %}{% for k, v in {'b': 1, 'a': 2} | dictsort(by='value', reverse=true) %}{{ k }};{% endfor %}
{% for k in map %}{{ k }};{% endfor %}
{% for c in 'ab' %}{{ c }}.{% endfor %}
{{ word is string }} {{ map is mapping }} {{ list is sequence }} {{ word is sequence }} {{ map is sequence }} {{ list is iterable }} {{ word is iterable }} {{ n is iterable }} {{ nil is none }} {{ n is number }} {{ f is number }} {{ yes is number }} {{ n is integer }} {{ yes is integer }} {{ f is float }} {{ yes is boolean }} {{ yes is true }} {{ 1 is true }} {{ no is false }} {{ list is mapping }} {{ (1,) is sequence }} {{ map.items() is iterable }} {{ none_such is iterable }} {{ none_such is none }} {{ none_such is string }} {{ none_such is sequence }} {{ nil is defined }}
{{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ 'x' is in 'xyz' }} {{ 1 is in(list) }} {{ n is eq 7 }} {{ n is equalto(7) }} {{ n is gt(3) }} {{ n is lessthan 3 }} {{ word is lower }} {{ word is upper }} {{ n is callable }} {{ nil is sameas none_value }} {{ word is not string }} {{ word is not defined }}
{{ list | length }} {{ map | length }} {{ uni | length }} {{ none_such | length }} {{ list | count }}
{{ nil | length }}
{{ list | first }} {{ list | last }} {{ vacant | first }} {{ list | sort }} {{ words | sort }} {{ words | sort(case_sensitive=true) }} {{ list | sort(reverse=true) }} {{ people | sort(attribute='age') | map(attribute='name') | list }} {{ list | reverse | list }} {{ word | reverse }} {{ list | sum }} {{ people | sum(attribute='age') }} {{ list | min }} {{ list | max }} {{ [1, 2, 1] | unique | list }}
{{ people | map(attribute='name') | list }} {{ people | map(attribute='tag', default='-') | list }} {{ words | map('upper') | list }} {{ people | selectattr('tag') | map(attribute='name') | list }} {{ people | selectattr('age', 'gt', 1) | map(attribute='name') | list }} {{ people | rejectattr('tag', 'none') | map(attribute='name') | list }} {{ list | select('odd') | list }} {{ list | reject('eq', 1) | list }} {{ people | selectattr('tag', 'defined') | list | length }} {{ people | selectattr('name', 'equalto', 'bob') | first }} {{ people | selectattr('name', 'in', ['Ann']) | list | length }}
{{ words | batch(2) | list }} {{ words | batch(2, '-') | list }} {{ [1,2,3,4,5] | slice(2) | list }}
{% for g in people | groupby('age') %}{{ g.grouper }}:{{ g.list | length }};{% endfor %}
{{ '3.7' | float }} {{ '3' | int }} {{ '3.7' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ f | int }} {{ 'x' | float }} {{ '0x1f' | int(base=16) }} {{ yes | int }} {{ 2.567 | round(2) }} {{ 2.5 | round }} {{ 3.5 | round }} {{ 2.4 | round(0, 'ceil') }} {{ 7 | round }} {{ neg | abs }}
{{ s | trim }}|{{ 'xax' | trim('x') }}|{{ text | trim }}|
{{ text | indent }}|{{ text | indent(2, true) }}|{{ text | indent(2, blank=true) }}|{{ text | indent(width='>>') }}
{{ s | escape }} {{ s | e }} {{ s | safe }} {{ s | string }} {{ n | string }} {{ 'a b c' | wordcount }} {{ word | list }} {{ 'x' | upper | lower }} {{ map | list }}
{{ '<b>x</b> y' | striptags }}
{{ 'hello world foo' | truncate(9) }}
{{ 'a b' | urlencode }}
{{ word | center(10) }}|
{{ range(3) | list }} {{ range(1, 7, 2) | list }} {{ range(3, 0, -1) | list }} {{ dict(a=1, b='x') }} {{ dict(a=1) | tojson }}
{{ strftime_now('%Y-%m-%d %H:%M:%S %j %y %b %B %a %A %d %e %I %p %% %-d %-m %u %w %U %F %T %D') }}
{{ strftime_now('%d %B %Y') }}
{{ raise_exception('no: ' ~ word) }}
{{ 'a\nb\tc\\d\'e\x41\u00e9\"f' }}
{{ "it's" }} {{ 'say "x"' }} {{ ["it's", 'say "x"', 'a\nb', "\\"] }}
{# comment #}x{#- y -#} z
  {% if yes %}
a
  {% endif %}
b
a {%- if yes -%} b {%- endif -%} c
{% raw %}{{ not }} {% if %}{% endraw %}
{% set x = 1 %}{% set y, z = 2, 3 %}{{ x }}{{ y }}{{ z }}{% set q %}block {{ x }}{% endset %}{{ q }}
{% set x = 1 %}{% for i in list %}{% set x = i %}{% endfor %}{{ x }}
{% set ns = namespace(a=1, b=[]) %}{% for i in list %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }} {{ ns.b }} {{ ns.c is defined }}
{% for i in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
{% for i in list if i > 1 %}{{ i }}{{ loop.length }}{% else %}none{% endfor %}{% for i in [] %}{% else %}empty{% endfor %}
{% for i in list %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}{% for i in list %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in list %}{% if loop.changed(i) %}{{ i }}{% endif %}{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }};{% endfor %}
{% macro m(a, b='d', c=none_such) %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}{{ m(1, 2, 3) }}{{ m() }}
{% macro wrap() %}<{{ caller() }}>{% endmacro %}{% call wrap() %}in{% endcall %}
{% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}{% endmacro %}{{ r(3) }}
{% macro k() %}{{ kwargs | length }}{{ varargs | length }}{% endmacro %}{{ k(1, 2, a=3) }}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}
{% filter upper %}abc {{ word }}{% endfilter %}
{% generation %}gen {{ word }}{% endgeneration %}
{%- generation -%}  gen  {%- endgeneration -%}  x
{% generation %}{% set inner = 1 %}{% endgeneration %}{{ inner is defined }}
{% if no %}a{% elif n == 7 %}b{% else %}c{% endif %}
{% if vacant %}x{% else %}y{% endif %}{% if {} %}x{% else %}y{% endif %}{% if 0.0 %}x{% else %}y{% endif %}{% if ' ' %}x{% endif %}{% if nil %}x{% else %}y{% endif %}
{{ map['a']['k'][1] }} {{ map.a.k[-2] }} {{ (map.a).k | last }}
{{ people[0].name }} {{ people[0]['name'] }} {{ people | last | tojson }}
{{ none_such == nil }} {{ none_such == none_such }} {{ not none_such }} {{ none_such or 'x' }}
{{ [1, 2] == [1, 2] }} {{ (1, 2) == [1, 2] }} {{ {'a': 1} == {'a': 1} }} {{ '1' == 1 }}
{{ none_such + 'x' }}
{{ none_such() }}
{{ word.nothing() }}
{{ word | nothing }}
{{ 1 // 0 }}
{% for x in 5 %}{% endfor %}
{% for x in none_such %}a{% else %}b{% endfor %}
{% for x in nil %}a{% endfor %}
{{ lipsum is defined }} {{ cycler is defined }} {{ joiner is defined }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner(', ') %}{{ j() }}x{{ j() }}y
{{ list.append(4) }}
{{ list.index(1) }} {{ list.count(1) }} {{ words.copy() if no else '' }}
{% do list %}
{{ 'a' if yes else 'b' ~ 'c' }} {{ 1 + 2 * 3 - 4 / 2 }} {{ -n + 1 }} {{ - -1 }} {{ 'a' ~ 1 ~ 2.0 ~ nil ~ yes }}
{{ 1_000 }} {{ 0x1f }} {{ 0b11 }} {{ 0o17 }} {{ 1.5e3 }}
{{ "%s" % map.z }} {{ "%s" % people[0].name | upper }} {{ "%d%%" % (n * 2) }}
{{ '%.3f' % 1 }} {{ '%+d' % 5 }} {{ '% d' % 5 }} {{ '%*d' % (5, 3) }} {{ '%i' % 3.9 }} {{ '%s' % 1e16 }} {{ '%.1e' % 12345.678 }}
{{ 'abc' | batch(2) | list }} {{ 'abc' | first }} {{ 'abc' | last }}
{{ 'abc' | random | length }}
{{ [[1, 2], [3]] | sum(start=[]) }} {{ [1.5, 2] | sum }}
{{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }} {{ [[1, 2]] | map(attribute=1) | list }} {{ ['1', '2'] | map('int') | sum }}
{{ self is defined }}
{{ namespace(x=1).x }} {{ true }} {{ True }} {{ none_value }} {{ None }} {{ False }}
{{ text | wordwrap(5) }}
{{ 1234567 | filesizeformat }}
{{ list | pprint }}
{{ {'a': 1} | xmlattr }}
{{ '\\' }} {{ '\u4e16' }} {{ 'tab\there' }} {{ '\d' }}
{{ "\U0001f980" }}
{{ '\101' }}
{{ +1 }}
{{ '%r %r %a|%-6s|%6.2s|%%' % (word, uni, uni, yes, word) }}
{{ '%s' % map }}
{{ {'f': 1e17, 'l': [(1e-7,)]} }}
{{ 'x'.join(['a', 'b']) ~ ['a', 1e16] | join('~') }}
{{ nil | default('a') }}{{ none_such | d }}{{ vacant | default('e', true) }}{{ 0 | default(1, boolean=true) }}{{ map.q | default(map.z) }}
""".strip("\n").split("\n")

# Lines that belong together: a statement needs its newlines.
MULTI = [
    "{% for i in list %}\n  {% if i > 1 %}\n    {{ i }}\n  {% endif %}\n{% endfor %}\nend\n",
    "{%- for i in list %}\n{{ i }}\n{%- endfor %}\n\n",
    "  {%+ if yes %}  x\n  {%- endif +%}\n y",
    "{# c #}\n{{ word }}\n{# c\nd #}\n  {# e #}\nz",
    "\n{{ word }}\n\n",
    "{% set x %}\n  a\n{% endset %}\n[{{ x }}]",
    "{% macro m(x) %}\n- {{ x }}\n{% endmacro %}\n{{ m(1) }}{{ m(2) }}",
    "a\r\n{% if yes %}\r\nb\r\n{% endif %}\r\nc\r\n",
    "{{ {\n  'a': '%s'\n    % word,\n  'b': [n % 4,\n n % 5]\n} | tojson }}",
    "{{\n'}}' ~ '%}'\n}}",
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Reads <file> & returns 'text' — \"quoted\", größe 世界",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "a\nb"},
                    "opts": {"type": "object", "properties": {"z": {"type": "number", "minimum": 0.5, "maximum": 1e16}, "a": {"enum": [1, None, True, "x"]}}},
                },
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "description": "", "parameters": {"type": "object", "properties": {}}}},
]

U = lambda text: {"role": "user", "content": text}
S = lambda text: {"role": "system", "content": text}
A = lambda text, **more: {"role": "assistant", "content": text, **more}
T = lambda text: {"role": "tool", "content": text}
CALL = lambda name, args: {"id": "c1", "type": "function", "function": {"name": name, "arguments": args}}

CONVERSATIONS = {
    "one": [U("Hi")],
    "system": [S("Be brief. <>&'\""), U("  Hi  ")],
    "turns": [U("1+1?"), A("2", reasoning_content="easy\n"), U("and 2+2?"), A("4", reasoning_content="\n also easy"), U("thanks")],
    "inline-think": [U("a"), A("<think>\nwhy\n</think>\n\nbecause"), U("b")],
    "tools": [
        S("Use tools."),
        U("Look at a.rs and größe"),
        A("I will.", reasoning_content="need it", tool_calls=[CALL("look", {"path": "src/<a>&'b'.rs", "opts": {"z": 1.5, "a": None}}), CALL("ping", {})]),
        T("fn main() { println!(\"<&>\"); }\n"),
        T("pong 世界"),
        A("Done.", reasoning_content=""),
        U("Again"),
    ],
    "call-only": [U("go"), A("", tool_calls=[CALL("look", {"path": "x", "opts": [1, 2.0, "é"], "deep": True, "n": None, "f": 1e16})]), T("r1")],
    "null-content": [U("go"), {"role": "assistant", "content": None, "tool_calls": [CALL("ping", {})]}, T("ok"), A("fine")],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "this?"}]}],
    "unicode": [U("👩🏽\u200d🚀 שלום ไทย e\u0301 \u2028 nbsp\u00a0 <|im_end|>")],
    "wrapped": [U("real"), A("", tool_calls=[CALL("ping", {})]), U("<tool_response>\npong\n</tool_response>"), A("x", reasoning_content="keep")],
    "bad-role": [{"role": "wizard", "content": "abracadabra"}],
    "empty": [],
    "late-system": [U("a"), S("late"), U("b")],
}

SETTINGS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": TOOLS, "reasoning_effort": "low", "preserve_thinking": False},
    {"add_generation_prompt": True, "reasoning_effort": "medium"},
    {"add_generation_prompt": True, "reasoning_effort": "silly"},
]


def main():
    expressions = [{"source": e, **render(e, CONTEXT)} for e in EXPRESSIONS + MULTI]
    (HERE / "expressions.json").write_text(dump({"context": CONTEXT}, expressions))
    cases = []
    demo = HERE / "../../../../models/flash-demo-nvfp4/chat_template.jinja"
    for path in [demo, *sorted((HERE / "templates").glob("*.jinja"))]:
        name = "demo" if path is demo else path.name
        source = path.read_text()
        for conversation, messages in CONVERSATIONS.items():
            for setting in SETTINGS:
                result = render(source, {"messages": messages, "bos_token": "<s>", "eos_token": "</s>", **setting})
                cases.append({"template": name, "conversation": conversation, "setting": SETTINGS.index(setting), **result})
    head = {"conversations": CONVERSATIONS, "settings": SETTINGS}
    (HERE / "templates.json").write_text(dump(head, cases))


def dump(head, cases):
    lines = ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases)
    body = json.dumps(head, ensure_ascii=False)
    return body[:-1] + ', "cases": [\n' + lines + "\n]}\n"


main()
