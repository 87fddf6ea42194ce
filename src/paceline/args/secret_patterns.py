"""Regular expressions of secrets in text. Compiling them takes 7 ms, so this module is loaded with the first mask.

Every repetition is bounded, so that no text makes the search quadratic.
"""

from __future__ import annotations

import re

_WORDS = (
    r"password|passwd|passphrase|secret|connection[_-]?string|(?:access|auth|refresh)[_-]?token"
    r"|(?<![A-Za-z0-9])(?:hub|hf|huggingface|api|bot|csrf|deploy|github|gitlab|id|jwt|login|private|secret|security"
    r"|session|slack|user|wandb)[_-]token"
    r"|(?:api|access|account|secret|auth|private)[_-]?key(?:[_-]?id)?"
)
# `hub_token`, `--api-key`, `password`; not `include_num_input_tokens_seen` or `max_new_tokens`
SECRET_NAME = re.compile(rf"(?:^|[_\-.])(?:credentials?|authorization|{_WORDS})$|(?:^|\.|^--?)token$", re.IGNORECASE)
# other tokens: vocabulary tokens are text, access tokens look machine-generated (see `_MADE`)
TOKEN_NAME = re.compile(r"[_-]token$", re.IGNORECASE)
_QUOTE = r"\\{0,3}['\"]"
_SIGN = r"(?:[^\s&'\",;)<>\]}\\]|\\(?!['\"]))"
# in quotes up to the closing one: a password may have spaces
_VALUE = rf"(?!none\b|null\b|true\b|false\b)(?:(?<=['\"])[^'\"\\\r\n]{{1,200}}(?={_QUOTE})|{_SIGN}+)"
_MADE = rf"(?={_SIGN}{{0,64}}[0-9])(?={_SIGN}{{0,64}}[A-Za-z]){_SIGN}{{8}}{_SIGN}*"
MADE_VALUE = re.compile(_MADE)
_ANY_TOKEN = r"(?<![\w-])(?:--?)?[A-Za-z0-9][\w-]{0,40}[_-]token"
_PREFIX = rf"(?:[rbfu]{{1,2}}(?={_QUOTE}))?"  # of a literal in Python
_TYPE = r":\s{0,3}(?:str|bytes|string|Any|SecretStr|(?:Optional|Final|ClassVar)(?:\[str\])?)(?:\s?\|\s?None)?\s{0,3}="
_ASSIGN = rf"(?:{_TYPE}|[:!]?={{1,3}}>?|:)"
_LINES = r"(?:\(\s{1,40}(?:\+\s{1,40})?)?"  # a bracket before a value on the next line, perhaps in a diff
_JOINT = rf"(?:{_QUOTE})?\]?\s{{0,9}}{_ASSIGN}\s{{0,9}}{_LINES}{_PREFIX}(?:{_QUOTE})?"
# name and value in any notation: a command line, JSON, YAML, a URL, an exception, source code
PAIR = re.compile(rf"((?:{_WORDS}){_JOINT}){_VALUE}", re.IGNORECASE)
TOKEN_PAIR = re.compile(rf"({_ANY_TOKEN}{_JOINT}){_MADE}", re.IGNORECASE)
# names that are too common for a secret, before a value that can be nothing else; keys of object stores have slashes
LONG_PAIR = re.compile(
    rf"((?<![\w-])(?:key{_JOINT}(?=[A-Za-z0-9]{{32}})|(?:_?auth|token|pass|pwd){_JOINT}))"
    r"(?=[A-Za-z+/-]{0,64}[0-9])(?=[0-9+/-]{0,64}[A-Za-z])[A-Za-z0-9+/-]{20,999}={0,2}",
    re.IGNORECASE,
)
# the files .netrc, and the user of curl
LOGIN = re.compile(
    r"(\blogin\s{1,9}\S{1,99}\s{1,9}(?:\+\s{0,9})?password\s{1,9}"
    r"|\bcurl\s[^\r\n]{0,99}?(?<=\s)(?:-u|--user)\s{0,3}['\"]?[^\s:'\"]{1,64}:)[^\s'\"<>]+"
)
# an option and its value in running text; these words after an option are prose, not a value
_PROSE = (
    r"(?!(?:an?|and|are|argument|as|at|by|can|does|environment|flag|for|from|given|has|if|in|instead|is|it|may|must|needs?"
    r"|not|of|on|only|option|or|set|that|the|to|too|value|was|which|will|with|you|your)\b)"
)
SPACED = re.compile(
    rf"((?<![\w-])--(?:(?:[A-Za-z0-9][\w-]{{0,40}}[_-])?(?:{_WORDS})|token)\s{{1,3}}(?:{_QUOTE})?)(?!-){_PROSE}{_VALUE}",
    re.IGNORECASE,
)
# URLs that are secret as a whole: webhooks, to which anybody who knows the URL can write
HOOK = re.compile(
    r"(\b(?:hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
    r"|(?:webhook|outlook)\.office(?:365)?\.com/webhook(?:b2)?)/|\bapi\.telegram\.org/bot)[^\s'\"<>?#]{8,}",
    re.IGNORECASE,
)
# these words are common in prose, so their values are secrets only in `name=value` or in quotes; `sig=0.5` also occurs
# in folder names
COMMON_PAIR = re.compile(
    r"((?<![\w-])(?:--?)?(?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|credentials?|pwd|token"
    rf"|aws\w{{0,20}}key\w{{0,20}}|googleaccessid|(?<=[?&])(?:key|sig|sas|auth|jwt|code(?==[\w%./~+-]{{10}}))|(?:sig|sas)(?==[\w%+-]{{16}}))"
    rf"(?:=(?:{_QUOTE})?|(?:{_QUOTE})?\s{{0,9}}:\s{{0,9}}{_QUOTE}))"
    rf"{_VALUE}",
    re.IGNORECASE,
)
HEADER = re.compile(
    rf"(\bBearer\s{{1,9}}|\bauthorization(?:{_QUOTE})?\s{{0,9}}[=:]\s{{0,9}}(?:{_QUOTE})?(?:(?:Basic|Token)\s{{1,9}})?)"
    r"(?!Bearer\b|Basic\b|Token\b)[^\s'\",;<>]{6,}",
    re.IGNORECASE,
)
# a command line as an exception shows it: `'--hub_token', 'x'`
_LISTED = rf"{_QUOTE},\s{{0,3}}[rbfu]{{0,2}}{_QUOTE})(?!--)"
OPTION = re.compile(
    rf"({_QUOTE}--?(?:(?:[A-Za-z0-9][\w-]{{0,40}}[_-])?(?:{_WORDS})|token){_LISTED}{_VALUE}", re.IGNORECASE
)
# also `os.getenv("WANDB_API_KEY", "x")`
TOKEN_OPTION = re.compile(
    rf"({_QUOTE}(?:{_ANY_TOKEN}|(?:[A-Za-z0-9][\w-]{{0,40}}[_-])?(?:{_WORDS}|token)){_LISTED}{_MADE}", re.IGNORECASE
)
URL_PASSWORD = re.compile(r"(?<=://)(?:[^/\s:@]{0,99}:[^/\s@]{1,999}|[^/\s:@]{16,999})(?=@)")
FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:npm|r8|dop_v1|[sr]k_live|[sr]k_test)_[A-Za-z0-9]{16,}|pypi-[\w-]{32,}|sk-[\w-]{16,}"
    r"|(?:gsk|lsv2_pt|lsv2_sk|shpat|dor_v1|glsa|tgp_v1)_\w{16,}|(?:xai|pplx|nvapi|tskey-auth)-[\w-]{16,}"
    r"|SG\.[\w-]{16,99}\.[\w-]{16,}|dapi[0-9a-f]{32}|AGE-SECRET-KEY-1[A-Z0-9]{16,}|[0-9]{8,10}:AA[\w-]{32,}"
    r"|[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}"
    r"|eyJ[\w-]{8,2000}\.[\w-]{8,2000}\.[\w-]{8,2000})"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^-]{0,9999}-----END [A-Z ]{0,40}PRIVATE KEY-----|[^-]{0,9999})"
)
VARIABLE = re.compile(r"(?i)(?:^|_)(?:secret|token|password|passwd|credentials?|\w*key|key_id|sas|connection_string)$")

WITH_VALUES = (HOOK, HEADER, LOGIN, OPTION, TOKEN_OPTION, COMMON_PAIR, PAIR, TOKEN_PAIR, LONG_PAIR, SPACED)
"""Patterns whose group 1 is the name of a secret; the rest of the match is its value. The order counts."""
