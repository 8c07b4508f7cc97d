#!/usr/bin/env bash
# Runs Go tests. Prints a line a minute, the failures, what was skipped and why, the names of what
# failed, and the totals as the last line. Arguments are passed to `go test`, which then runs with the
# race detector, in the module of the directory MODULE (default: the main one). Without arguments it
# runs whole parts:
#
#   PARTS=main     all that needs no Kubernetes: the default
#   PARTS=cluster  Kubernetes, what needs KubeVirt's launcher (integration/kubevirt), and the next
#                  part, if scripts/build-kubevirt.sh has built what it needs
#   PARTS=kubevirt a whole KubeVirt: kubernetes/integration/kubevirt
#   PARTS='main cluster'
#
# Of main, the packages of scripts/race-packages run with the race detector. RACE=yes is all with it,
# and RACE=no none.
#
# BUILD and BUILD_INSTALLED have commands, each ended by a semicolon, that build what tests wait for.
# INSTALL is a program that ends before the first test, and before the commands of BUILD_INSTALLED.
# BESIDE names programs that run one after the other, when the builds have ended. If one of all these
# fails, this fails. What one prints appears when it has ended, that of a build only if it fails.
set -euo pipefail
cd -P "$(dirname "$0")/.."

parts=${PARTS:-main} race=${RACE:-} go=${GO:-go} root=$PWD module=${MODULE:-.}
IFS=';' read -ra build <<<"${BUILD:-}"
IFS=';' read -ra build_installed <<<"${BUILD_INSTALLED:-}"
install=${INSTALL:-} programs=${BESIDE:-}
unset PARTS RACE MODULE BUILD BUILD_INSTALLED INSTALL BESIDE

# The compiler makes no debugging data, which the linker would drop, and may use more memory to
# collect less garbage: for a big package, this saves 40 % of the time. Without -trimpath, a checkout
# in another directory would be compiled anew: that is 9 of 12 processor minutes. All that tests and
# the programs beside them build has the same flags, and is as static as what is released, so that
# nothing is compiled twice.
# shellcheck disable=SC2089 # the go command reads the quotes
GOFLAGS="$("$go" env GOFLAGS) -trimpath -gcflags=all=-dwarf=false '-toolexec=env GOGC=300'"
# shellcheck disable=SC2090
export GOFLAGS CGO_ENABLED=0 TEST_GOFLAGS=$GOFLAGS # the last for fuzz.sh
mkdir -p bin
"$go" build -o bin/testsum ./scripts/testsum

dir=$(mktemp -d)
groups=() # of processes, each to be ended as a whole
cleanup() {
	local group
	for group in "${groups[@]}"; do
		kill -- "-$group" 2>/dev/null || true
	done
	rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 1' INT TERM

background() {
	set -m
	"$@" </dev/null &
	set +m
	groups+=($!)
}
# stream starts a command in the background. testsum reads what it prints.
streams=()
stream() { # stream NAME COMMAND...
	mkfifo "$dir/$1.stream"
	streams+=("$dir/$1.stream")
	background into "$dir/$1.stream" "${@:2}"
}
into() { "${@:2}" >"$1"; } # opened in the background: it waits for the reader

# printed is the file of what a command printed.
printed() {
	local name=${*#scripts/}
	echo "$dir/${name//\//_}"
}
# logged runs a command. From its file, with .log until it ends, testsum tells how far it is.
logged() {
	local status=0 to
	to=$(printed "$@")
	"$@" >"$to.log" 2>&1 || status=$?
	mv "$to.log" "$to"
	return $status
}
# failed prints an event that names a command, and the file of its output if that is to be shown.
failed() { printf '{"Action":"program-failed","Package":"%s","Output":"%s"}\n' "$1" "${2:-}"; }

built() {
	if logged "$@"; then
		echo "ok    $*"
	else
		failed "$*" "$(printed "$@")"
	fi
}
builders=()
# build_beside starts builds. The tests that need one wait for the lock that it holds. It has it when
# it first says something.
build_beside() {
	local line command i to
	for line in "$@"; do
		read -ra command <<<"$line"
		[ ${#command[@]} -gt 0 ] || continue
		to=$(printed "${command[@]}")
		background built "${command[@]}" >"$dir/build${#builders[@]}"
		builders+=($!)
		for ((i = 0; i < 100; i++)); do
			if [ -s "$to.log" ] || ! kill -0 $! 2>/dev/null; then
				break
			fi
			sleep 0.1
		done
	done
}
# beside runs the programs of BESIDE after the builds: tests wait for those, and together they would
# slow each other down.
beside() {
	local i program
	for i in "${!builders[@]}"; do
		tail --pid="${builders[i]}" -f /dev/null
		cat "$dir/build$i"
	done
	for program in $programs; do
		if logged "$program"; then
			cat "$(printed "$program")"
			echo "ok    $program"
		else
			cat "$(printed "$program")"
			failed "$program"
		fi
	done
}

# While the tools are installed, all that tests import is compiled.
compile() {
	"$go" list -e -deps -test -export ./... >/dev/null 2>&1 || true
	[[ $parts != *cluster* ]] || "$go" list -C kubernetes -e -deps -test -export ./... >/dev/null 2>&1 || true
}

build_beside "${build[@]}"
if [ -n "$install" ]; then
	background compile
	compiler=$!
	"$install"
	kill -- "-$compiler" 2>/dev/null || true # the tests compile the rest
fi
build_beside "${build_installed[@]}"

if [ "$race" != no ] && ! command -v "${CC:-gcc}" >/dev/null; then
	echo "test: no C compiler, so the tests run without the race detector" >&2
	[ "${KUBEVIRT_DISK_REQUIRE_TOOLS:-}" != 1 ] || exit 1
	race=no
fi
# The race detector keeps notes of all memory, by default in small pages. With large ones, half of the
# kernel's work is gone, a third of the time that the tests of registry take.
export GORACE="no_huge_pages_for_shadow=0 ${GORACE:-}"

# The nightly run has more rounds of many tests. One of integration takes an hour then.
limit=20m whole=60m
[ "${KUBEVIRT_DISK_NIGHTLY:-}" != 1 ] || { limit=60m whole=90m; }
# The linter runs go vet.
go_test() {
	[ $# -gt 0 ] || return 0
	"$go" test -json -count=1 -vet=off -timeout "$whole" -exec "'$root/scripts/limit.sh' $limit" \
		-parallel "$(nproc)" -p "$(nproc)" "$@" || echo '{"Action":"command-failed"}'
}
raced() { [ $# = 0 ] || CGO_ENABLED=1 go_test -race "$@"; }

# without_race runs those tests of directories that are not for the race detector, by their build tag.
without_race() {
	local path names=
	local -A tagged=()
	while read -r path; do
		names+=$(sed -nE 's/^func (Test\w+)\(.*/|\1/p' "$path" | tr -d '\n')
		tagged[${path%/*}]=1
	done < <(for path in "$@"; do grep -lsx '//go:build !race' "$path"/*_test.go; done)
	[ ${#tagged[@]} = 0 ] || go_test -run "^(${names#|})\$" "${!tagged[@]}"
}

# directories prints those of packages, those with the longest tests first: so none of the long ones
# runs alone in the end.
directories() {
	"$go" list -f '{{.Dir}}' "$@" | while read -r path; do
		printf '%s\t%s\n' "$(cat "$path"/*_test.go 2>/dev/null | wc -c)" ".${path#"$PWD"}"
	done | sort -rn | cut -f 2
}
# select_main sets which packages of the main part run with the race detector, and which without.
main_raced=() main_plain=() launcher=./integration/kubevirt
select_main() {
	local path
	for path in $(directories ./...); do
		[ "$path" != "$launcher" ] || continue
		if [ "$race" = yes ] || { [ "$race" = "" ] && grep -qx "${path#./}" scripts/race-packages; }; then
			main_raced+=("$path")
		else
			main_plain+=("$path")
		fi
	done
}
with_race() { raced "${main_raced[@]}" && without_race "${main_raced[@]}"; }

# The module kubernetes. Tests of one package first: the others wait for what is built.
cluster() (
	cd kubernetes
	mapfile -t unit < <(directories ./... | grep -v '^\./integration')
	mapfile -t node < <(directories ./integration/...)
	"$1" "${unit[@]}" "${node[@]}"
	# What needs a control plane runs again, with the oldest Kubernetes that is promised, and what
	# shows that its kubelet mounts images and runs the pods of users.
	[ "${KUBEVIRT_DISK_NIGHTLY:-}" = 1 ] || return 0
	export KUBEVIRT_DISK_PLANE=oldest
	{
		"$1" ./integration ./integration/{admission,identities}
		"$1" -run '^Test(Identity|Examples)$' ./integration/node
	} | sed -u 's|"Package":"[^"]*|& with Kubernetes 1.33|'
)

# again runs rooms of integration with the clients of each release of scripts/generations.
again() { # again go_test|raced
	local clients release releases rooms=(./integration/iscsi ./integration/nbd)
	[ "${KUBEVIRT_DISK_NIGHTLY:-}" != 1 ] || rooms+=(./integration/{images,kubevirt,machines,registry,volumes})
	mapfile -t releases < <(grep -v '^#' scripts/generations)
	clients=$(scripts/build-clients.sh 2>"$dir/clients") || {
		failed scripts/build-clients.sh "$dir/clients"
		return 0
	}
	if [ -z "$clients" ]; then
		printf '%s\n' '{"Action":"output","Package":"clients","Test":"later","Output":"    not run: needs mmdebstrap"}'
		echo '{"Action":"skip","Package":"clients","Test":"later"}'
		return 0
	fi
	for release in "${releases[@]}"; do
		KUBEVIRT_DISK_GENERATION=$clients/$release "$1" "${rooms[@]}" |
			sed -u "s|\"Package\":\"[^\"]*|& with $release|"
	done
}

# Two streams of tests run at the same time: those of integration often only wait.
first() {
	local part detector=go_test
	[ "$race" != yes ] || detector=raced
	for part in $parts; do
		case $part in
		main) with_race ;;
		cluster) cluster "$detector" ;;
		kubevirt) (cd kubernetes && go_test ./integration/kubevirt) ;; # it tests containers: no race detector
		esac
	done
}
second() {
	local part detector=go_test
	[ "$race" != yes ] || detector=raced
	for part in $parts; do
		case $part in
		main)
			go_test "${main_plain[@]}"
			again "$detector"
			;;
		cluster) "$detector" "$launcher" ;;
		esac
	done
}
stream beside beside
if [ $# -gt 0 ]; then
	detector=raced
	[ "$race" != no ] || detector=go_test
	cd "$module"
	stream tests "$detector" "$@"
	cd "$root"
else
	select_main
	stream first first
	stream second second
fi
bin/testsum -beside "$dir" "${streams[@]}"
