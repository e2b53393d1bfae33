#!/bin/sh
# The programs that some tests drive: a C compiler (it builds the fake NVML), tmux (a real terminal), and Chromium (it
# opens HTML reports).
# Installed where that is possible; where it is not, those tests skip and say why.
missing=
command -v gcc >/dev/null 2>&1 || missing="$missing gcc libc6-dev"
command -v tmux >/dev/null 2>&1 || missing="$missing tmux"
command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || missing="$missing chromium fonts-dejavu-core"
[ -z "$missing" ] && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "installing$missing" >&2
    # shellcheck disable=SC2086
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } \
        >/dev/null 2>&1 || echo "could not install$missing: the tests that need them will be skipped" >&2
else
    echo "not here:$missing; the tests that need them will be skipped" >&2
fi
exit 0
