#!/bin/sh
# Makes .venv and installs this checkout into it:  sh tools/venv.sh run|dev
#   run  what the server needs        dev  the same plus what tests, linters and type checks need
# Does nothing, in a few milliseconds, when the last installation still fits.
set -eu

want=$1
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

say() { printf '%s\n' "$*" >&2; }
die() { say "make: $*"; exit 1; }

# Two verbs started together must not install into one folder at the same time.
if command -v flock >/dev/null 2>&1; then
    exec 9>.venv.lock
    flock 9
fi

# What an installation depends on: the declared packages, this script, and where the checkout lies
# (an editable install and every script of a venv hold absolute paths).
state=$(printf '%s\n' "$root" | cat - pyproject.toml tools/venv.sh | cksum)
current() { [ -x .venv/bin/python ] && [ "$(cat ".venv/$1.stamp" 2>/dev/null)" = "$state" ]; }

# mypy and import-linter cannot follow the editable install's import hook; these links let them.
lay_links() {
    mkdir -p .typing/ultraflash
    for room in ptx graphs runtime kvshare server tools; do
        link=.typing/ultraflash/$room
        if [ -f "$room/__init__.py" ]; then
            [ -L "$link" ] || ln -s "../../$room" "$link"
        elif [ -L "$link" ]; then
            rm "$link"
        fi
    done
    [ -L .typing/helpers ] || ln -s ../tests/helpers .typing/helpers
}

if [ "$want" = dev ]; then lay_links; fi
if current dev || { [ "$want" = run ] && current run; }; then exit 0; fi

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
version='import sys; print("%d.%d" % sys.version_info[:2])'
python='' bare='' old=''
for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14; do
    path=$(command -v "$name" 2>/dev/null) || continue
    if "$path" -c "$new_enough" >/dev/null 2>&1; then
        if "$path" -c 'import venv, ensurepip' >/dev/null 2>&1; then python=$path; break; fi
        bare=${bare:-$path}
    else
        old=${old:-"$path is $("$path" -c "$version" 2>/dev/null || echo 'no working Python')"}
    fi
done
if [ -z "$python" ] && [ -n "$bare" ]; then
    v=$("$bare" -c "$version")
    die "$bare (Python $v) has no venv module: install the package python$v-venv" \
        "(apt-get install python$v-venv) and run make again."
fi
[ -n "$python" ] || die "ultraflash needs Python 3.11 or newer and found ${old:-none}: install the" \
    "packages python3.11 and python3.11-venv (apt-get install python3.11 python3.11-venv), or name" \
    "another interpreter with PYTHON=/path/to/python3.x."

v=$("$python" -c "$version")
if ! [ -x .venv/bin/python ] || [ "$(cat .venv/made-for 2>/dev/null)" != "$root $v" ]; then
    say "making .venv with $python (Python $v)"
    "$python" -m venv --clear .venv || die "$python could not make .venv: see the lines above."
    echo "$root $v" >.venv/made-for
fi

rm -f .venv/run.stamp .venv/dev.stamp
case $want in
    run) what=. ;;
    dev) what='.[dev]' ;;
    *) die "tools/venv.sh takes run or dev, not '$want'." ;;
esac
say "installing $what into .venv (about half a minute on the first run)"
.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check -e "$what" ||
    die "pip could not install $what: see the lines above."
echo "$state" >".venv/$want.stamp"
